"""Config and load_config: builds the configuration from arguments, flags, the environment and a YAML file.

The order of precedence: constructor arguments and flags, then `LLAISYS_*`, then YAML, then the default. Each
field is a flag (`--max-num-seqs`), an environment variable (`LLAISYS_MAX_NUM_SEQS`) and a YAML key
(`max_num_seqs`) of the same name. An unknown YAML key or an invalid value is an error that names the key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from llaisys.config.engine_config import EngineConfig
from llaisys.config.server_config import ServedModelConfig, ServerConfig
from llaisys.errors import RejectedError

FILE_BYTES_MAX = 1 << 20  # maximum size of a --config file
# The source of a value, in ascending order of precedence.
Source: TypeAlias = Literal["default", "file", "environment", "flag"]


class Config(ServerConfig, ServedModelConfig, EngineConfig, BaseSettings):
    """All settings of a server and its models (one model, or those of `models`). Immutable."""

    model_config = SettingsConfigDict(
        env_prefix="LLAISYS_", extra="forbid", frozen=True, protected_namespaces=()
    )

    def each_model(self) -> tuple[Config, ...]:
        """Return one configuration per served model; the first is the default of requests.

        Raises RejectedError naming the invalid entry of `models`.
        """
        if not self.models:
            return (self,)
        if twice := {"model", "served_model_name"} & self.model_fields_set:
            raise RejectedError(
                f"models has all models; remove {' and '.join(sorted(twice))}", param="models"
            )
        shared = self.model_dump(include=self.model_fields_set - ServerConfig.model_fields.keys())
        made: dict[str, Config] = {}
        for i, entry in enumerate(self.models):
            where, own = f"models[{i}]", {key.replace("-", "_"): value for key, value in entry.items()}
            name = own.pop("name", None)
            if not isinstance(name, str) or not name or name in made:
                raise RejectedError(f"{where}: name is {name!r}, expected a unique string", param="models")
            if wrong := sorted(map(str, own.keys() & ServerConfig.model_fields.keys())):
                raise RejectedError(f"{where}: {wrong[0]} is a setting of the server", param="models")
            values = {**shared, **own, "served_model_name": (name,), "models": ()}
            try:
                made[name] = Config(**{"model": name, **values})
            except ValidationError as e:
                raise RejectedError(f"{where}.{_first_of(e)}", param="models") from e
        for module in self.lora_modules:
            if module.base_model_name not in made:
                raise RejectedError(
                    f"lora_modules: base_model_name of {module.name} is {module.base_model_name!r}, expected "
                    f"one of the models: {', '.join(made)}",
                    param="lora_modules",
                )
        for name, config in made.items():
            own_modules = [m for m in config.lora_modules if m.base_model_name in (None, name)]
            made[name] = config.model_copy(update={"lora_modules": tuple(own_modules)})
        for name in ("session_store", "prefix_cache_dir"):
            folders = [getattr(config, name) for config in made.values()]
            resolved = [folder.resolve() for folder in folders if folder is not None]
            if len(resolved) > len(set(resolved)):
                raise RejectedError(
                    f"two models have the same {name}; set a different one for each", param=name
                )
        return tuple(made.values())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 -- the framework's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- as above
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- as above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use arguments, environment and YAML only; no .env files and no secret folders."""
        return (init_settings, env_settings)


def load_config(overrides: dict[str, Any] | None = None, yaml_path: Path | None = None) -> Config:
    """Build the configuration from flags (`overrides`), the environment and a YAML file.

    Raises RejectedError naming the key and the error.
    """
    return explain_config(overrides, yaml_path)[0]


def explain_config(
    overrides: dict[str, Any] | None = None, yaml_path: Path | None = None
) -> tuple[Config, dict[str, Source]]:
    """Build the configuration as `load_config` does; also return the source of each value."""
    values = dict(overrides or {})
    sources: dict[str, Source] = {}
    from_environment = {name.upper() for name in os.environ}  # pydantic-settings reads them in any case
    for key, value in _read_yaml(yaml_path).items():
        if f"LLAISYS_{key.upper()}" not in from_environment and key not in values:
            values[key] = value
            sources[key] = "file"
    try:
        config = Config(**values)
    except ValidationError as e:
        text = _first_of(e)
        raise RejectedError(text, param=text.partition(":")[0]) from e
    for each in config.each_model():
        _check_modules(each)
    for key in Config.model_fields:
        unnamed: Source = "environment" if key in config.model_fields_set else "default"
        sources.setdefault(key, "flag" if key in values else unnamed)
    return config, sources


def _check_modules(config: Config) -> None:
    """Raise RejectedError for LoRA adapters that cannot be served."""
    names, n_max = [module.name for module in config.lora_modules], config.max_loras
    if names and not config.enable_lora:
        raise RejectedError("lora_modules needs enable_lora; set --enable-lora", param="lora_modules")
    if len(names) > n_max:
        raise RejectedError(
            f"lora_modules has {len(names)} adapters, max_loras is {n_max}; raise it", param="lora_modules"
        )
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RejectedError(f"lora_modules has two adapters named {twice!r}", param="lora_modules")


def _first_of(error: ValidationError) -> str:
    """Return the first error as `key: message (got the value)`."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "configuration"
    shown = "" if key.startswith("api_key") else f" (got {first['input']!r})"
    return f"{key}: {first['msg']}{shown}"


def _read_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:  # may be a FIFO, such as the shell's `<(...)`
            raw = file.read(FILE_BYTES_MAX + 1)
        loaded = yaml.safe_load(raw.decode("utf-8")) if len(raw) <= FILE_BYTES_MAX else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as e:
        raise RejectedError(f"cannot read the configuration file {path}: {e}", param="config") from e
    if len(raw) > FILE_BYTES_MAX:
        raise RejectedError(f"{path} is larger than {FILE_BYTES_MAX} bytes", param="config")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise RejectedError(
            f"{path} contains a {type(loaded).__name__}, expected key: value lines", param="config"
        )
    return {str(key).replace("-", "_"): value for key, value in loaded.items()}
