"""KvEventsConfig: the settings of KV events, in vLLM's JSON form."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

Endpoint = Annotated[str, Field(pattern=r"^(tcp|ipc)://.+", max_length=256)]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class KvEventsConfig:
    """Events of the prefix cache over ZeroMQ. The names, meanings and defaults are vLLM's.

    - `enable_kv_cache_events`: publish them. `publisher`: `null` publishes nothing.
    - `endpoint`: address of the PUB socket. An address with `*` or `::`, or of the scheme ipc, is bound; any
      other is connected to. `replay_endpoint`: address of the ROUTER socket that sends batches again.
    - `buffer_steps`: batches that can be sent again. `hwm`: batches that wait for a slow subscriber before
      ZeroMQ drops them. `max_queue_size`: batches that wait for the publisher thread.
    - `topic`: the first frame of each message.
    """

    enable_kv_cache_events: bool = False
    publisher: Literal["null", "zmq"] = "zmq"
    endpoint: Endpoint = "tcp://*:5557"
    replay_endpoint: Endpoint | None = None
    buffer_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    hwm: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    max_queue_size: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    topic: Annotated[str, Field(max_length=256)] = ""

    @property
    def publishes(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"
