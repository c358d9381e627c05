"""The settings, in three groups: of an engine, of a served model, and of the server.

`Config` has all of them. Code that needs one group only takes that class: the engine knows no port.
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
from llaisys.config.loading import FILE_BYTES_MAX, Config, Source, explain_config, load_config
from llaisys.config.server_config import SECRETS, ServedModelConfig, ServerConfig

__all__ = [
    "DEFAULT_MODEL",
    "FILE_BYTES_MAX",
    "SECRETS",
    "Config",
    "EngineConfig",
    "ServedModelConfig",
    "ServerConfig",
    "Source",
    "bare_environment",
    "cubin_folder",
    "cuda_library_folders",
    "explain_config",
    "home_folder",
    "load_config",
    "package_version",
]
