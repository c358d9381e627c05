"""The exception hierarchy, sorted by what the caller can do. The compiled core raises the same classes.

LlaisysError
├── RejectedError       (ValueError)    the input is wrong: fix it                400
│   ├── ContextLengthError              prompt and completion do not fit          400
│   └── NotFoundError                   no session or file of this name           404
├── UnsupportedError    (ValueError)    this build, model or device cannot        400
├── ExhaustedError      (RuntimeError)  not now: retry                            429
│   └── QueueFullError                  the waiting queue is full                 429 + Retry-After
├── RequestTimeoutError (TimeoutError)  older than its deadline                   408
├── RequestFailedError  (RuntimeError)  this request failed, others continue      500
├── CoreFaultError      (RuntimeError)  a call failed without side effects: isolate  500
├── StorageError        (OSError)       the server's storage failed; nothing was written  500
│   ├── StorageFullError                full, or a quota or size limit is reached 507
│   └── StorageBusyError                another process or other requests use it  503 + Retry-After
└── EngineDeadError     (RuntimeError)  the engine or device failed: rebuild      503
"""

from __future__ import annotations

import math


class LlaisysError(Exception):
    """Base of all errors that LLAISYS raises.

    `param` names the invalid field or setting, if there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RejectedError(LlaisysError, ValueError):
    """The input is invalid; the message names the value, the bound and the fix."""


class ContextLengthError(RejectedError):
    """Prompt plus completion can never fit in the context or the KV cache."""


class NotFoundError(RejectedError):
    """The client has no session or file of this name."""


class UnsupportedError(LlaisysError, ValueError):
    """Valid, but not supported by this build, model or device."""


class ExhaustedError(LlaisysError, RuntimeError):
    """A bounded resource (KV cells, sequence ids) is exhausted; the call may succeed later."""


class QueueFullError(ExhaustedError):
    """The waiting queue is full. `retry_after_s`: whole seconds until a retry."""

    def __init__(self, message: str, *, retry_after_s: float = 1) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(retry_after_s))


class RequestTimeoutError(LlaisysError, TimeoutError):
    """The request exceeded its deadline, waiting or running."""


class RequestFailedError(LlaisysError, RuntimeError):
    """One request failed (for example, non-finite logits); others are unaffected."""


class SlowReaderError(RequestFailedError):
    """The reader of this stream exceeded the bound of undelivered output."""


class CoreFaultError(LlaisysError, RuntimeError):
    """The core panicked and rolled back: the call had no side effects and the context stays usable.

    The engine isolates the failing row; its request ends with RequestFailedError.
    """


class StorageError(LlaisysError, OSError):
    """A file of the server (a saved session, the chat store) cannot be read or written.

    A failed write leaves no part behind. The log has the path and the cause.
    """


class StorageFullError(StorageError):
    """The disk is full, or a quota or the file size limit is reached."""


class StorageBusyError(StorageError):
    """Another process has locked the file, or too many calls wait for it; the call may succeed later."""


class EngineDeadError(LlaisysError, RuntimeError):
    """The engine, the core or the device failed; every open request ends with this."""


class InvariantError(EngineDeadError):
    """A check found the engine's state inconsistent, which is a bug; the engine has stopped."""
