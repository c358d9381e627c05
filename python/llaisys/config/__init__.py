"""The settings, in three classes: EngineConfig, ServedModelConfig and ServerConfig.

`Config` combines them. Code that needs only one class uses that, so the engine has no server settings.
`GROUPS` has the order in which users see them.
"""

from __future__ import annotations

from llaisys.config.engine_config import DEFAULT_MODEL, EngineConfig
from llaisys.config.environment import (
    bare_environment,
    cubin_folder,
    cuda_library_folders,
    home_folder,
    package_version,
)
from llaisys.config.groups import GROUPS
from llaisys.config.kv_events_config import KvEventsConfig
from llaisys.config.loading import FILE_BYTES_MAX, Config, Source, explain_config, load_config
from llaisys.config.lora_module import LoraModule
from llaisys.config.server_config import SECRETS, ServedModelConfig, ServerConfig
from llaisys.config.speculative_config import SpeculativeConfig

__all__ = [
    "DEFAULT_MODEL",
    "FILE_BYTES_MAX",
    "GROUPS",
    "SECRETS",
    "Config",
    "EngineConfig",
    "KvEventsConfig",
    "LoraModule",
    "ServedModelConfig",
    "ServerConfig",
    "Source",
    "SpeculativeConfig",
    "bare_environment",
    "cubin_folder",
    "cuda_library_folders",
    "explain_config",
    "home_folder",
    "load_config",
    "package_version",
]
