"""start_engine: starts an engine for a configuration, on a thread of this process or in a child process."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from functools import partial

from llaisys.config import EngineConfig
from llaisys.engine.client import Deliver, EngineClient, InprocClient
from llaisys.engine.grammar import GrammarCompiler
from llaisys.engine.host import available_bytes, usable_cpus
from llaisys.engine.loop import build_engine
from llaisys.engine.memory import GpuSettings, size_encoder, size_engine
from llaisys.engine.process import ProcessClient
from llaisys.engine.watchdog import EngineWatchdog
from llaisys.engine.worker import cuda_info
from llaisys.errors import UnsupportedError
from llaisys.model_info import CudaDevice, ModelInfo

log = logging.getLogger(__name__)


def start_engine(
    config: EngineConfig,
    info: ModelInfo,
    deliver: Deliver,
    *,
    exits: bool = False,
    grammar_compiler: GrammarCompiler | None = None,
    n_clients: int = 1,
    draft: ModelInfo | None = None,
) -> EngineClient:
    """Size an engine, load the model, and return when requests are accepted.

    - `exits`: after a stall, the watchdog ends this process if it is still running (for servers).
    - `grammar_compiler`: for structured outputs. Without it, requests with a grammar are rejected.
    - `n_clients`: clients that share the engine. `draft`: the second model of speculative decoding.

    With the device auto, the GPU `cuda_device` is used if it is usable and can run this model with these
    settings. Otherwise the CPU is used, and the log has the reason. Raises RejectedError or UnsupportedError
    naming the setting.
    """
    cpus = usable_cpus(config.cpu_threads_bind, config.tensor_parallel_size)

    def start(gpu: GpuSettings | None) -> EngineClient:
        if info.is_encoder:
            sizing = size_encoder(config, info, available_bytes(), cpus, n_clients=n_clients)
        else:
            sizing = size_engine(
                config, info, available_bytes(), cpus, gpu=gpu, n_clients=n_clients, draft=draft
            )
        log.info("%s", sizing.summary)
        # Check stderr here, because the stderr of an engine process is a pipe to this process.
        settings = replace(sizing.settings, shows_progress=sys.stderr.isatty())
        sizing = replace(sizing, settings=settings)
        watchdog = EngineWatchdog(config.watchdog_window_s, exits=exits)
        if config.engine_process:
            tokenizer = None if grammar_compiler is None else grammar_compiler.tokenizer
            return ProcessClient(sizing, config, deliver, grammar_tokenizer=tokenizer, watchdog=watchdog)
        build = partial(build_engine, sizing, config.seed, grammar_compiler)
        return InprocClient(build, sizing.limits, deliver, watchdog=watchdog)

    if info.is_encoder and config.device == "cuda":
        raise UnsupportedError(
            f"{info.architecture} is an encoder, which runs on the CPU only; set device cpu", param="device"
        )
    if config.device == "cpu" or info.is_encoder:
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


def _gpu_settings(config: EngineConfig) -> GpuSettings:
    return GpuSettings(
        ordinal=config.cuda_device,
        memory_share=config.gpu_memory_utilization,
        synchronous=config.cuda_sync,
        overlap=config.cuda_overlap,
    )


def check_gpu(ordinal: int) -> CudaDevice:
    """Return the GPU with this number. Raises UnsupportedError with the exact reason if it is not usable."""
    info = cuda_info()
    if info.reason is not None:
        raise UnsupportedError(f"device 'cuda' cannot be used: {info.reason}", param="device")
    if ordinal >= len(info.devices):
        raise UnsupportedError(
            f"cuda_device is {ordinal}, allowed are 0 to {len(info.devices) - 1} on this machine",
            param="cuda_device",
        )
    return info.devices[ordinal]
