"""What can go wrong on the way from a model's name to its files."""

from __future__ import annotations

from llaisys.errors import LlaisysError


class PullError(LlaisysError, RuntimeError):
    """A model could not be fetched; the message says why and what to do. Nothing is left half-done."""
