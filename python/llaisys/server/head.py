"""What every object of one answer begins with."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from llaisys.errors import RejectedError
from llaisys.server.trace import REQUEST_ID_MAX, clean_request_id


@dataclass(frozen=True, slots=True)
class Head:
    """`id` names the answer over HTTP. `created_s`: Unix time."""

    id: str
    model: str
    created_s: int

    @staticmethod
    def new(prefix: str, model: str, request_id: str | None = None) -> Head:
        """A head with an id of its own, `prefix-<hex>`, or `prefix-<request_id>` as the client wishes.

        Raises RejectedError for a `request_id` that could not stand in logs and URLs.
        """
        if request_id and (len(request_id) > REQUEST_ID_MAX or clean_request_id(request_id) != request_id):
            raise RejectedError(
                f"request_id may have at most {REQUEST_ID_MAX} letters, digits, '-', '_' and '.'",
                param="request_id",
            )
        return Head(f"{prefix}-{request_id or uuid.uuid4().hex}", model, int(time.time()))

    def of(self, kind: str) -> dict[str, Any]:
        """The fields that begin an object of this kind."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": None,
        }
