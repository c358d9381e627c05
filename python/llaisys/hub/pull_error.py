"""PullError: the error of a failed download."""

from __future__ import annotations

from llaisys.errors import LlaisysError


class PullError(LlaisysError, RuntimeError):
    """A model could not be downloaded; the message has the cause and the fix. No partial file remains."""
