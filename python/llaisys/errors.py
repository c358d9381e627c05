"""The exception tree, sorted by what the caller can do. The compiled core raises the same classes.

LlaisysError
├── RejectedError       (ValueError)    the input is wrong: fix it                400
│   ├── ContextLengthError              prompt and answer do not fit              400
│   └── NotFoundError                   no session or file of this name           404
├── UnsupportedError    (ValueError)    this build, model or device cannot        400
├── ExhaustedError      (RuntimeError)  not now: retry                            429
│   └── QueueFullError                  the waiting queue is full                 429 + Retry-After
├── RequestTimeoutError (TimeoutError)  older than its deadline                   408
├── RequestFailedError  (RuntimeError)  this request failed, others go on         500
├── CoreFaultError      (RuntimeError)  a call failed and changed nothing: isolate  500
├── StorageError        (OSError)       a disk of ours failed; nothing was kept   500
│   ├── StorageFullError                it is full, or a quota or size is reached 507
│   └── StorageBusyError                another process or other requests use it  503 + Retry-After
└── EngineDeadError     (RuntimeError)  the engine or device failed: rebuild      503
"""

from __future__ import annotations

import math


class LlaisysError(Exception):
    """Base of every error that LLAISYS raises on purpose.

    `param` names the offending field or setting where there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class RejectedError(LlaisysError, ValueError):
    """The input is wrong; the message says which value, the bound and what to do."""


class ContextLengthError(RejectedError):
    """Prompt plus answer can never fit the context or the KV cache."""


class NotFoundError(RejectedError):
    """The client has nothing of this name."""


class UnsupportedError(LlaisysError, ValueError):
    """Understood but not implemented by this build, model or device."""


class ExhaustedError(LlaisysError, RuntimeError):
    """A bounded resource (KV cells, sequence ids) is used up; the call may succeed later."""


class QueueFullError(ExhaustedError):
    """The waiting queue is at its bound. `retry_after_s`: when to try again, in whole seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1) -> None:
        super().__init__(message)
        self.retry_after_s = max(1, math.ceil(retry_after_s))


class RequestTimeoutError(LlaisysError, TimeoutError):
    """The request got older than its deadline, waiting or running."""


class RequestFailedError(LlaisysError, RuntimeError):
    """This one request failed (a non-finite row, say); others are untouched."""


class SlowReaderError(RequestFailedError):
    """The reader of this stream fell further behind than is held for it."""


class CoreFaultError(LlaisysError, RuntimeError):
    """The core panicked where it could roll back: the call has changed nothing and the context goes on. The
    engine looks for the row that it was; a caller outside sees RequestFailedError."""


class StorageError(LlaisysError, OSError):
    """A file of the server (a saved session, the chat store) cannot be read or written; no part of a failed
    write stays. The log has the path and the reason."""


class StorageFullError(StorageError):
    """No space left: the disk, a quota or the largest size of a file."""


class StorageBusyError(StorageError):
    """Another process holds the file, or too many calls wait for it; the call may succeed later."""


class EngineDeadError(LlaisysError, RuntimeError):
    """The engine, the core or the device failed; every open request ends with this."""


class InvariantError(EngineDeadError):
    """The engine's own books were found wrong, which is a bug, and so it has ended."""
