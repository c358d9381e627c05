"""`llaisys bench serve`: send load to a server and return metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from tqdm import tqdm

from llaisys.bench.benchmark_metrics import compute_metrics
from llaisys.bench.http_client import Target, first_model, session_of
from llaisys.bench.load_generator import Run, run_load
from llaisys.bench.workload import Workload, arrival_times
from llaisys.errors import RequestFailedError

WARMUP_SEED = 2**32  # separate prompts, so that the measured ones are not in the prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeBenchmark:
    """One run. `request_rate`: requests per second; infinite sends all at once.

    At least one of `warmups` requests runs first, so that invalid settings fail with the server's message.
    """

    target: Target
    workload: Workload
    seed: int = 0
    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    warmups: int = 0
    percentiles: Sequence[float] = (99.0,)
    objectives_ms: Mapping[str, float] = field(default_factory=dict)
    progress: bool = False

    def run(self) -> tuple[dict[str, Any], Run]:
        """Return the result with vLLM's keys (plus `seed` and `client`), and the run.

        Raises RejectedError (address, model) or RequestFailedError (the first request failed).
        """
        return asyncio.run(self._run())

    async def _run(self) -> tuple[dict[str, Any], Run]:
        conversations = self.workload.draw(self.seed)
        n_requests = sum(map(len, conversations))
        rate = self.request_rate * len(conversations) / n_requests
        due_s = arrival_times(len(conversations), rate, self.burstiness, self.seed)
        async with session_of(self.target) as session:
            target = self.target
            if not target.model:
                target = replace(target, model=await first_model(session, target))
            warm = replace(self.workload, num_prompts=max(1, self.warmups)).draw(self.seed + WARMUP_SEED)
            first = await run_load(session, target, warm, [0.0] * len(warm), self.max_concurrency)
            if first.records[0].error:
                raise RequestFailedError(f"the first request failed with {first.records[0].error}")
            with tqdm(total=n_requests, disable=not self.progress) as bar:
                run = await run_load(session, target, conversations, due_s, self.max_concurrency, bar.update)
        result = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "endpoint_type": target.backend,
            "backend": target.backend,
            "model_id": target.model,
            "base_url": target.base_url,
            "dataset_name": self.workload.dataset,
            "num_prompts": n_requests,
            "seed": self.seed,
            "request_rate": "inf" if self.request_rate == float("inf") else self.request_rate,
            "burstiness": self.burstiness,
            "max_concurrency": self.max_concurrency,
            **compute_metrics(run.records, run.duration_s, self.percentiles, self.objectives_ms),
            "client": run.overhead.report(),
        }
        return result, run
