"""PrefixAffinityRouter: Ray Serve's router from a gateway to the replicas."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from llaisys.ray.affinity import rank_replicas
from llaisys.ray.exchange import HttpExchange


class PrefixAffinityRouter(RequestRouter):
    """Sends the turns of a conversation to one replica, unless that one is busy and another is not.

    Ray's own `PrefixCacheAffinityRouter` needs `ray[llm]`, which installs vLLM.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Set `target_ongoing_requests`, the open requests with which a replica counts as busy."""
        self._target: int = kwargs["target_ongoing_requests"]

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the candidates in the order in which Ray should try them."""
        exchange = pending_request.args[0] if pending_request and pending_request.args else None
        if not isinstance(exchange, HttpExchange):
            return [candidate_replicas]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if exchange.replica in by_id:
            return [[by_id[exchange.replica]]]
        if not exchange.affinity.key:
            return [candidate_replicas]
        n_open = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_id.items()
        }
        return [[by_id[name]] for name in rank_replicas(exchange.affinity, n_open, self._target)]
