"""What every object of one answer begins with."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Head:
    """`id` is the engine's request id too. `created_s`: Unix time."""

    id: str
    model: str
    created_s: int

    @staticmethod
    def new(prefix: str, model: str) -> Head:
        """A head with an id of its own, `prefix-<hex>`."""
        return Head(f"{prefix}-{uuid.uuid4().hex}", model, int(time.time()))

    def of(self, kind: str) -> dict[str, Any]:
        """The fields that begin an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": None,
        }
