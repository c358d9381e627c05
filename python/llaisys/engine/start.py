"""From a configuration to a running engine: sized for this machine, on a thread or in a process."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import partial

from llaisys.config import Config
from llaisys.engine.capacity import size
from llaisys.engine.client import Deliver, EngineClient
from llaisys.engine.grammar import Grammars
from llaisys.engine.inproc import InprocClient
from llaisys.engine.loop import build_engine
from llaisys.engine.machine import available_bytes, usable_cpus
from llaisys.engine.process import ProcessClient
from llaisys.engine.settings import GpuSettings
from llaisys.engine.watch import Watch
from llaisys.engine.worker import cuda_info
from llaisys.errors import UnsupportedError
from llaisys.types import CudaDevice, ModelInfo

log = logging.getLogger(__name__)


def start_engine(
    config: Config,
    info: ModelInfo,
    deliver: Deliver,
    *,
    exits: bool = False,
    grammars: Grammars | None = None,
    n_clients: int = 1,
) -> EngineClient:
    """Sizes an engine, loads the model into it, and returns when requests are welcome.

    `exits`: this process is a server, and ends if its engine is stuck. `grammars`: of the model; None: it
    refuses requests that have one. `n_clients`: clients that each have a share of it.

    `device` auto is the GPU that `cuda_device` names, if it can be used and computes this model with these
    settings; the log says why not.

    Raises RejectedError or UnsupportedError: a setting or the model, by name.
    """
    cpus = usable_cpus(config.cpu_threads_bind, config.tensor_parallel_size)

    def start(gpu: GpuSettings | None) -> EngineClient:
        capacity = size(config, info, available_bytes(), cpus, gpu=gpu, n_clients=n_clients)
        log.info("%s", capacity.summary)
        # Looked up here: the stderr of an engine process is a pipe, which is passed on to ours.
        settings = replace(capacity.settings, shows_progress=sys.stderr.isatty())
        capacity = replace(capacity, settings=settings)
        watch = Watch(config.watchdog_window_s, exits=exits)
        if config.engine_process:
            tokens = None if grammars is None else grammars.tokens
            return ProcessClient(capacity, config, deliver, grammar_tokens=tokens, watch=watch)
        build = partial(build_engine, capacity.settings, capacity.limits, config.seed, grammars)
        return InprocClient(build, capacity.limits, deliver, watch=watch)

    if config.device == "cpu":
        return start(None)
    try:
        gpu = check_gpu(config.cuda_device)
        log.info("device %s: %s", config.device, gpu.name)
        return start(_gpu_settings(config))
    except UnsupportedError as error:
        if config.device == "cuda":
            raise
        log.info("device auto: the CPU (%s)", error)
    return start(None)


def _gpu_settings(config: Config) -> GpuSettings:
    return GpuSettings(
        ordinal=config.cuda_device,
        memory_share=config.gpu_memory_utilization,
        synchronous=config.cuda_sync,
        overlap=config.cuda_overlap,
    )


def check_gpu(ordinal: int) -> CudaDevice:
    """The GPU of that number. Raises UnsupportedError, with the exact reason, if it cannot be used."""
    info = cuda_info()
    if info.reason is not None:
        raise UnsupportedError(f"device 'cuda' cannot be used: {info.reason}", param="device")
    if ordinal >= len(info.devices):
        raise UnsupportedError(
            f"cuda_device is {ordinal}, this machine's are 0 to {len(info.devices) - 1}", param="cuda_device"
        )
    return info.devices[ordinal]
