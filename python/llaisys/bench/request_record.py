"""The client's record of one request. Times are `time.perf_counter()` seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. An empty `error` means a complete response.

    - `due_s`: scheduled start. `start_s`: actual start; in between it waits for `--max-concurrency` or a late
      client.
    - `chunk_times_s`: arrivals of chunks with text. A chunk may have several tokens.
    - `end_s`: arrival of the last chunk with a choice, normally the one with the finish reason.
    - `prompt_tokens`, `output_tokens`: from the server's `usage`.
    """

    due_s: float
    start_s: float = 0.0
    chunk_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    text: str = ""
    status: int = 0
    error: str = ""

    @property
    def first_s(self) -> float:
        """Return the arrival of the first text, or of the end if no text arrived."""
        return self.chunk_times_s[0] if self.chunk_times_s else self.end_s

    @property
    def ttft_s(self) -> float:
        """Return the time to first token, in seconds."""
        return self.first_s - self.start_s

    @property
    def latency_s(self) -> float:
        """Return the seconds from sending to the end."""
        return self.end_s - self.start_s

    @property
    def tpot_s(self) -> float:
        """Return the seconds per output token after the first; 0 for a completion of one token."""
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def itls_s(self) -> list[float]:
        """Return the gaps between chunks with text, in seconds."""
        times = self.chunk_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def queue_s(self) -> float:
        """Return the seconds in the client before sending."""
        return self.start_s - self.due_s
