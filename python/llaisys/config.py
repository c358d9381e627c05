"""The only settings. Order: constructor arguments and flags, then `LLAISYS_*`, then YAML, then the default.

Each field is a flag (`--max-num-seqs`), an environment variable (`LLAISYS_MAX_NUM_SEQS`) and a YAML key
(`max_num_seqs`) of the same name. An unknown YAML key or a bad value stops the start and names the key.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from llaisys.errors import RejectedError

DEFAULT_MODEL = "smollm2"
FILE_BYTES_MAX = 1 << 20  # of a --config file
# Where a value comes from, the weakest first.
Source: TypeAlias = Literal["default", "file", "environment", "flag"]
# What an entry of `models` cannot set, because all of them share it.
OF_THE_SERVER = frozenset(
    {
        "models",
        "served_model_name",
        "host",
        "port",
        "api_key",
        "api_key_file",
        "prefix_cache_sharing",
        "max_concurrent_requests_per_key",
        "max_requests_per_minute_per_key",
        "max_chat_bytes_per_key",
        "max_body_bytes",
        "max_body_bytes_in_flight",
        "max_response_bytes",
        "max_response_bytes_in_flight",
        "upload_timeout_s",
        "send_timeout_s",
        "allowed_origins",
        "allowed_hosts",
        "strict_fields",
        "shutdown_timeout_s",
        "log_level",
        "uds",
        "ssl_certfile",
        "ssl_keyfile",
        "ssl_ca_certs",
        "ssl_cert_reqs",
        "timeout_keep_alive_s",
        "otlp_traces_endpoint",
    }
)


# Settings that are shown to nobody. HF_TOKEN and OTEL_EXPORTER_OTLP_HEADERS are never settings: the libraries
# read them.
SECRETS = frozenset({"api_key"})


class Config(BaseSettings):
    """One server and its models: one, or those of `models`. Frozen once made."""

    model_config = SettingsConfigDict(
        env_prefix="LLAISYS_", extra="forbid", frozen=True, protected_namespaces=()
    )

    # model
    model: str = Field(
        DEFAULT_MODEL,
        description="a folder, a .gguf file, an embedded model, or a Hugging Face id: org/name[:FILE.gguf]",
    )
    revision: str | None = Field(
        None,
        min_length=1,
        description="branch, tag or commit of a Hugging Face id (default: its main branch)",
    )
    served_model_name: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="names that requests may use; the first is reported (default: the model)"
    )
    models: Annotated[tuple[dict[str, Any], ...], NoDecode] = Field(
        (),
        description="several models in one server, in place of model: each {name: ..., model: ...} and any "
        "setting of its own",
    )
    preload: bool = Field(True, description="load the model at the start; no: at its first request")
    idle_unload_s: float | None = Field(
        None, gt=0, description="seconds without a request after which the model is unloaded (default: never)"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="weights and products; auto keeps the checkpoint's own precision"
    )
    quantization: Literal["int8", "int4"] | None = Field(
        None,
        description="quantise a float checkpoint as it is loaded: 8.25 bits a weight, or 4.5 (head 6.25)",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the model runs")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory that weights, K and V may take (device cuda)"
    )
    cuda_device: int = Field(0, ge=0, le=63, description="which GPU, in the driver's order (device cuda)")
    cuda_sync: bool = Field(
        False, description="wait after every kernel, so that an error names it; slow (device cuda)"
    )
    cuda_overlap: bool = Field(
        True, description="launch a decode step before the tokens of the one before are known (device cuda)"
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8", "int8_per_token_head"] = Field(
        "auto",
        description="K and V; auto is float32 with dtype float32, else bfloat16 (on a GPU the weights' type)"
        "; int8 (vLLM's int8_per_token_head) takes about half of that",
    )
    generation_config: Literal["auto", "vllm"] = Field(
        "auto", description="auto takes sampling defaults from the model, vllm ignores them"
    )
    chat_template: Path | None = Field(
        None, description="a Jinja file that replaces the model's chat template"
    )
    enable_auto_tool_choice: bool = Field(
        False, description="let the model decide when to call a tool; needs tool_call_parser"
    )
    tool_call_parser: Literal["hermes", "llama3_json"] | None = Field(
        None, description="how the model writes calls of tools (Qwen writes them as hermes does)"
    )
    reasoning_parser: Literal["deepseek_r1", "qwen3"] | None = Field(
        None,
        description="how the model marks its reasoning: deepseek_r1 begins with it, qwen3 may with <think>",
    )
    pooling_type: Literal["auto", "mean", "last"] = Field(
        "auto", description="which final hidden states an embedding is the mean of; auto is the model's own"
    )
    seed: int = Field(0, ge=0, le=2**63 - 1, description="seed of requests that bring none")

    # capacity
    max_model_len: int | None = Field(
        None, ge=1, description="context of one request, in tokens (default: the model's)"
    )
    max_num_seqs: int = Field(
        64, ge=1, le=256, description="sequences at the same time, one for each choice of a running request"
    )
    max_concurrent_requests: int | None = Field(
        None, ge=1, description="bounds max_num_seqs and max_batch_size (default: max_num_seqs)"
    )
    max_batch_size: int | None = Field(
        None, ge=1, description="requests of one step; more take turns (default: all that run)"
    )
    max_num_batched_tokens: int = Field(512, ge=1, description="tokens of one step over all requests")
    max_num_queued_reqs: int = Field(256, ge=0, description="requests that may wait; one more gets 429")
    max_num_queued_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens of prompts that may wait; one that adds more gets 429 (default: no bound)",
    )
    max_input_tokens: int | None = Field(
        None, ge=1, description="tokens of a prompt; more get 400 (default: the context)"
    )
    max_output_tokens: int | None = Field(
        None, ge=1, description="tokens of an answer; an explicit excess gets 400 (default: the context)"
    )
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="bytes for K and V (default: at most a fifth of the available memory)"
    )
    num_kv_cells: int | None = Field(
        None, ge=1, description="KV cells, one token each; with the bytes too, the smaller counts"
    )
    num_kv_streams: int = Field(
        1, ge=1, le=64, description="arenas that the KV cells are divided into; sharing across them copies"
    )
    enable_prefix_caching: bool = Field(True, description="keep computed prefixes for later requests")
    kv_eviction_policy: Literal["lru"] = Field("lru", description="which cached prefix goes first")
    kv_eviction_threshold: float = Field(
        1.0, gt=0, le=1, description="share of the KV cells above which cached prefixes are let go"
    )
    kv_cleanup_interval_s: float = Field(
        1.0, gt=0, le=3600, description="seconds between two looks at that share"
    )

    max_sessions: int = Field(256, ge=0, description="named sessions of all clients, and saved ones of each")
    session_kv_share: float = Field(
        0.5, ge=0, le=1, description="share of the KV cells that sessions keep from being evicted"
    )
    session_store: Path | None = Field(
        None, description="a folder that sessions are saved in (default: they cannot be saved)"
    )

    # time and shares
    request_timeout_s: float = Field(
        600.0, gt=0, description="age, in seconds, at which a request ends with 408"
    )
    timeout_scan_s: float = Field(
        1.0, ge=0.5, le=5, description="seconds between two looks at the requests' ages"
    )
    max_queue_wait_s: float = Field(
        60.0, gt=0, description="seconds of waiting after which a request goes before all others"
    )
    max_step_time_s: float = Field(
        0.25, gt=0, description="seconds of a step above which it takes no more prompt tokens"
    )
    long_prefill_token_threshold: int | None = Field(
        None, ge=1, description="prompt tokens of one request in a step (default: no bound)"
    )
    max_client_tokens_per_step: int | None = Field(
        None, ge=1, description="tokens of one client in a step, while it prefills (default: no bound)"
    )

    engine_process: bool = Field(
        False, description="run the engine in a process of its own, which is restarted if it dies"
    )

    watchdog_window_s: float = Field(
        30.0,
        gt=0,
        le=86400,
        description="seconds without progress of the engine or the event loop after which the process is "
        "stuck and ends with exit code 70; without an admission a sixth of it; an event loop that is late by "
        "a sixth is logged",
    )

    # cpu
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="compute threads (default: one for each usable core)"
    )
    cpu_threads_bind: str = Field(
        "auto",
        description="CPUs that compute threads are kept to: auto (one of each core, unless a CPU quota is "
        "smaller), nobind, or a list such as 0-3,8; with ranks also one for each: 0-3|4-7",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=1024, description="ranks that the model is split over; each has its share of the threads"
    )
    screen_lm_head: bool = Field(
        True,
        description="keep an 8-bit copy of an lm_head in 16 or 32 bits, by which greedy tokens are found "
        "without reading all of it: the same tokens, sooner, for 27 to 53 % of its bytes more",
    )
    isa: Literal["auto", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni", "avx2", "scalar"] = Field(
        "auto",
        description="instruction set of the CPU kernels, one that the machine has (`llaisys doctor` lists "
        "them); auto is the best",
    )

    # server
    host: str = Field("127.0.0.1", description="address to bind")
    port: int = Field(8000, ge=0, le=65535, description="port to bind; 0 picks a free one")
    api_key: Annotated[tuple[str, ...], NoDecode] = Field(
        (), repr=False, description="accepted keys; none, and no api_key_file: no key is asked for"
    )
    api_key_file: Path | None = Field(
        None, description="a file of more accepted keys, hashed: a line NAME SHA256 for each"
    )
    prefix_cache_sharing: Literal["per-key", "all"] = Field(
        "per-key",
        description="who shares cached prefixes: requests of one key, or (all) of every key, which can then "
        "find out by cached_tokens and by time what others have sent",
    )
    max_concurrent_requests_per_key: int | None = Field(
        None, ge=1, description="open requests of one key; one more gets 429 (default: no bound)"
    )
    max_requests_per_minute_per_key: int | None = Field(
        None, ge=1, description="requests of one key in a minute; one more gets 429 (default: no bound)"
    )
    max_body_bytes: int = Field(4 << 20, ge=1, description="bytes of a request's body; more get 413")
    max_body_bytes_in_flight: int = Field(
        64 << 20, ge=1, description="bytes of the bodies of all open requests; more get 429"
    )
    max_response_bytes: int = Field(
        128 << 20,
        ge=1,
        description="bytes of a response that is not streamed; one that is, or will be, larger gets 400",
    )
    max_response_bytes_in_flight: int = Field(
        512 << 20, ge=1, description="bytes of all open responses that are not streamed; more get 429"
    )
    upload_timeout_s: float = Field(
        30.0, gt=0, description="seconds in which a request's head, and then its body, must arrive"
    )
    send_timeout_s: float = Field(
        30.0,
        gt=0,
        le=86400,
        description="seconds in which a client must take some of what it was sent; else it is dropped",
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="origins for CORS; none: same origin only"
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="more names under which clients reach the server (Host header), port or not"
    )
    chat_store: Path | None = Field(
        None, description="an SQLite file that keeps the page's chats (default: the browser alone does)"
    )
    max_chat_bytes_per_key: int = Field(
        256 << 20, ge=1, description="bytes of one key's chats in chat_store; a write beyond them gets 400"
    )
    strict_fields: bool = Field(False, description="refuse unknown request fields with 400")
    shutdown_timeout_s: float = Field(
        30.0,
        ge=0,
        description="seconds that open requests may go on after SIGTERM, or until a second one",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level that is logged"
    )
    uds: Path | None = Field(
        None, description="a Unix domain socket to listen on, in place of host and port (permissions: umask)"
    )
    ssl_certfile: Path | None = Field(None, description="PEM file of the certificate chain; with it: https")
    ssl_keyfile: Path | None = Field(None, description="PEM file of the certificate's key")
    ssl_ca_certs: Path | None = Field(
        None, description="PEM file of the authorities that clients' certificates are checked against"
    )
    ssl_cert_reqs: int = Field(
        0, ge=0, le=2, description="clients' certificates: 0 none asked for, 1 checked if sent, 2 required"
    )
    timeout_keep_alive_s: float = Field(
        5.0, gt=0, description="seconds that a connection may idle between two requests"
    )
    otlp_traces_endpoint: str | None = Field(
        None, description="OpenTelemetry collector (OTLP over HTTP) that gets a span for each request"
    )

    @field_validator("api_key", mode="before")
    @classmethod
    def _keys(cls, value: Any) -> Any:
        """As `_one_or_many`; refuses an empty key, which anybody could send."""
        keys = cls._one_or_many(value) or ([value] if isinstance(value, str) else value)
        if isinstance(keys, (list, tuple)) and any(not str(key).replace(",", "").strip() for key in keys):
            raise ValueError("a key is empty; is the shell variable unset that should hold it?")
        return keys

    @field_validator("served_model_name", "allowed_origins", "allowed_hosts", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        """A comma-separated string (environment) or a list (YAML, repeated flags)."""
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())

    @field_validator("models", mode="before")
    @classmethod
    def _entries(cls, value: Any) -> Any:
        """A list of mappings (YAML), each as YAML or JSON text (flags), or all as one text (environment)."""
        try:
            value = yaml.safe_load(value) if isinstance(value, str) else value
            return tuple(yaml.safe_load(each) if isinstance(each, str) else each for each in value)
        except (yaml.YAMLError, TypeError) as e:
            raise ValueError(f"expected a list of {{name: ..., model: ...}} ({e})") from e

    def each_model(self) -> tuple[Config, ...]:
        """One configuration for each served model; the first is the one that requests mean by default.

        Raises RejectedError naming the entry of `models` and what is wrong with it.
        """
        if not self.models:
            return (self,)
        if twice := {"model", "served_model_name"} & self.model_fields_set:
            raise RejectedError(
                f"models names them all; take out {' and '.join(sorted(twice))}", param="models"
            )
        shared = self.model_dump(include=self.model_fields_set - OF_THE_SERVER)
        made: dict[str, Config] = {}
        for i, entry in enumerate(self.models):
            where, own = f"models[{i}]", {key.replace("-", "_"): value for key, value in entry.items()}
            name = own.pop("name", None)
            if not isinstance(name, str) or not name or name in made:
                raise RejectedError(f"{where}: name is {name!r}, expected a text of its own", param="models")
            if wrong := sorted(map(str, own.keys() & OF_THE_SERVER)):
                raise RejectedError(f"{where}: {wrong[0]} is the server's, not a model's", param="models")
            values = {**shared, **own, "served_model_name": (name,), "models": ()}
            try:
                made[name] = Config(**{"model": name, **values})
            except ValidationError as e:
                raise RejectedError(f"{where}.{_first_of(e)}", param="models") from e
        stores = [config.session_store.resolve() for config in made.values() if config.session_store]
        if len(stores) > len(set(stores)):
            raise RejectedError(
                "two models have the same session_store: give each its own", param="session_store"
            )
        return tuple(made.values())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 the framework's signature
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- as above
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 -- as above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """No .env files and no secret folders: three sources are enough to explain a value."""
        return (init_settings, env_settings)


def load_config(overrides: dict[str, Any] | None = None, yaml_path: Path | None = None) -> Config:
    """Builds the configuration from flags (`overrides`), the environment and a YAML file.

    Raises RejectedError naming the key and what is wrong with it.
    """
    return explain_config(overrides, yaml_path)[0]


def explain_config(
    overrides: dict[str, Any] | None = None, yaml_path: Path | None = None
) -> tuple[Config, dict[str, Source]]:
    """The configuration as `load_config` builds it, and where each of its values comes from."""
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
    config.each_model()
    for key in Config.model_fields:
        unnamed: Source = "environment" if key in config.model_fields_set else "default"
        sources.setdefault(key, "flag" if key in values else unnamed)
    return config, sources


def _first_of(error: ValidationError) -> str:
    """`key: what is wrong (got the value)` of its first complaint."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"]) or "configuration"
    shown = "" if key.startswith("api_key") else f" (got {first['input']!r})"
    return f"{key}: {first['msg']}{shown}"


def _read_yaml(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with path.open("rb") as file:  # the shell's `<(...)`, too, so it may be a FIFO
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
            f"{path} holds a {type(loaded).__name__}, expected key: value lines", param="config"
        )
    return {str(key).replace("-", "_"): value for key, value in loaded.items()}


def home_folder() -> Path:
    """Where pulled models are kept: `LLAISYS_HOME`, `$XDG_CACHE_HOME/llaisys` or `~/.cache/llaisys`."""
    home = os.environ.get("LLAISYS_HOME")
    if home:
        return Path(home).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "llaisys"


def bare_environment() -> dict[str, str]:
    """What a Python process needs of ours to start and to know the local time: no setting, no secret."""
    needed = ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ")
    return {name: os.environ[name] for name in needed if name in os.environ}


def cuda_library_folders() -> list[Path]:
    """Where NVRTC, cublasLt and NCCL may be, the best first, as NVIDIA's cuda-pathfinder orders them.

    `LLAISYS_CUDA_LIB_DIR`; the packages that `llaisys[cuda-tp]` names, each layout of them; a conda
    environment; `CUDA_PATH` and `CUDA_HOME`. Imports none of those packages.
    """
    named = os.environ.get("LLAISYS_CUDA_LIB_DIR")
    folders = [Path(named).expanduser()] if named else []
    spec = find_spec("nvidia")
    for place in (spec and spec.submodule_search_locations) or ():
        folders += [Path(place, part, "lib") for part in ("cu13", "cuda_nvrtc", "cublas", "nccl")]
    for variable, part in (("CONDA_PREFIX", "lib"), ("CUDA_PATH", "lib64"), ("CUDA_HOME", "lib64")):
        if root := os.environ.get(variable):
            folders.append(Path(root, part))
    return [folder.absolute() for folder in folders if folder.is_dir()]


def cubin_folder() -> Path:
    """Where machine code of the CUDA kernels is kept: what one start compiled, the next one finds."""
    return home_folder() / "cubin"


def package_version() -> str:
    """The version that is installed now; `unknown` if LLAISYS runs from a source tree that is not."""
    try:
        return version("llaisys")
    except PackageNotFoundError:
        return "unknown"
