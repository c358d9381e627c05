"""ServerConfig and ServedModelConfig: the settings of a server, and of each model that it serves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import NoDecode

from llaisys.config.lora_module import LoraModule, read_module

# Settings whose values are never shown. HF_TOKEN and OTEL_EXPORTER_OTLP_HEADERS are not settings; libraries
# read them.
SECRETS = frozenset({"api_key"})


class ServedModelConfig(BaseModel):
    """How a server serves one model. Offline commands do not use these settings."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    preload: bool = Field(
        True,
        description="load the model at startup; otherwise at its first request, which then waits for it; "
        "turn it off for one of several models that is seldom used",
    )
    idle_unload_s: float | None = Field(
        None,
        gt=0,
        description="seconds without a request after which the model is unloaded (default: never); set it to "
        "free memory between uses",
    )
    lora_modules: Annotated[tuple[LoraModule, ...], NoDecode] = Field(
        (),
        description='LoRA adapters to load at startup, each name=path or JSON as in vLLM, {"name": ..., '
        '"path": ..., "base_model_name": ...}; requests select one by its name as their model; needs '
        "enable_lora",
    )
    enable_auto_tool_choice: bool = Field(
        False,
        description="accepted for compatibility, without effect: a model may always decide to call a tool",
    )
    tool_call_parser: (
        Literal[
            "hermes",
            "llama3_json",
            "mistral",
            "qwen3_coder",
            "pythonic",
            "deepseek",
            "lfm2",
            "openai",
            "gemma4",
        ]
        | None
    ) = Field(
        None,
        description="format in which the model writes tool calls (default: the one that its chat template "
        "shows); set it if tool_choice auto is refused or calls stay in the content",
    )
    reasoning_parser: Literal["deepseek_r1", "qwen3", "openai_gptoss", "gemma4"] | None = Field(
        None,
        description="format in which the model marks its reasoning (default: by chat template and the end "
        "of the prompt); deepseek_r1 starts with reasoning, qwen3 may open it with <think>, "
        "openai_gptoss has channels, gemma4 may open the channel of a thought",
    )

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _lora_modules(cls, value: Any) -> Any:
        """Read a list of modules (YAML, flags), or one text with commas between them (environment)."""
        if isinstance(value, str):
            value = yaml.safe_load(value) if value.lstrip()[:1] in ("[", "{") else value.split(",")
            value = [value] if isinstance(value, dict) else value
        return tuple(read_module(each) for each in value)


class ServerConfig(BaseModel):
    """The settings of one server. All its models share them; an entry of `models` cannot set them."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    # models
    served_model_name: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="names by which requests select the model; responses report the first (default: the "
        "model's own name)",
    )
    models: Annotated[tuple[dict[str, Any], ...], NoDecode] = Field(
        (),
        description="several models in one server, in place of model: each {name: ..., model: ...} plus the "
        "engine settings in which it differs",
    )

    # address
    host: str = Field(
        "127.0.0.1", description="address to bind; one that other machines can reach needs an API key"
    )
    port: int = Field(
        8000,
        ge=0,
        le=65535,
        description="TCP port to bind; 0 selects a free one; set it if the port is taken",
    )
    uds: Path | None = Field(
        None,
        description="Unix domain socket to listen on, in place of host and port; its permissions follow the "
        "umask; set it behind a proxy on the same machine",
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="origins that may call the API from a browser (CORS) (default: same origin only); add "
        "the origins of your web pages that call this server",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="further names under which clients reach the server (Host header), with or without a "
        "port; add the name that a reverse proxy forwards",
    )
    root_path: str = Field(
        "",
        description="path under which a reverse proxy serves this server, such as /llm, whether the proxy "
        "removes it or not; the OpenAPI document names it",
    )
    ssl_certfile: Path | None = Field(
        None,
        description="PEM file of the certificate chain; turns HTTPS on (default: HTTP); set it if no proxy "
        "does TLS",
    )
    ssl_keyfile: Path | None = Field(None, description="PEM file of the certificate's key, not encrypted")
    ssl_ca_certs: Path | None = Field(
        None,
        description="PEM file of the authorities that client certificates are verified against; set it with "
        "ssl_cert_reqs 2 to admit known clients only",
    )
    ssl_cert_reqs: int = Field(
        0, ge=0, le=2, description="client certificates: 0 not requested, 1 verified if sent, 2 required"
    )

    # keys and clients
    api_key: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        repr=False,
        description="accepted API keys (default: no key is required, unless api_key_file is set)",
    )
    api_key_file: Path | None = Field(
        None,
        description="file of further accepted keys as hashes, one line NAME SHA256 for each; set it for "
        "several clients with limits of their own",
    )
    prefix_cache_sharing: Literal["per-key", "all"] = Field(
        "per-key",
        description="clients that share cached prefixes: requests of the same key, or of all keys; with all, "
        "clients can learn from cached_tokens and timing what others have sent; set all only for "
        "clients that trust each other",
    )
    allow_model_management: bool = Field(
        False,
        description="let clients with an API key download and delete cached models (Ollama's /api/pull and "
        "/api/delete); without keys it has no effect",
    )
    allow_runtime_lora_updating: bool = Field(
        False,
        description="let every client load and unload LoRA adapters (/v1/load_lora_adapter), from any folder "
        "that the server can read; vLLM's VLLM_ALLOW_RUNTIME_LORA_UPDATING; set it only for "
        "trusted clients",
    )
    max_concurrent_requests_per_key: int | None = Field(
        None,
        ge=1,
        description="open requests of one key; further ones get 429 (default: no bound); set it for clients "
        "that open too many",
    )
    max_requests_per_minute_per_key: int | None = Field(
        None,
        ge=1,
        description="requests per minute of one key; further ones get 429 (default: no bound); set it for "
        "clients that send too many",
    )

    # requests and responses
    enable_force_include_usage: bool = Field(
        False,
        description="end every stream with its usage, as if the request had set stream_options.include_usage",
    )
    enable_request_id_headers: bool = Field(
        True,
        description="send the request's id as the header X-Request-Id, the client's own if it sent one; "
        "vLLM's default is off",
    )
    enable_per_request_metrics: bool = Field(
        False,
        description="add the times of a request to its completion, chat completion or response, as metrics; "
        "streams have them with their usage",
    )
    strict_fields: bool = Field(
        False,
        description="reject unknown request fields with 400; otherwise they are ignored and reported; set it "
        "to find misspelled fields",
    )
    drop_attribution_line: bool = Field(
        True,
        description="leave out the line x-anthropic-billing-header at the head of the system prompt of "
        "/v1/messages: Claude Code changes it in each request, so that no prefix would be cached",
    )
    max_body_bytes: int = Field(
        4 << 20,
        ge=1,
        description="bytes of one request body; a larger one gets 413; raise it for long documents",
    )
    max_body_bytes_in_flight: int = Field(
        64 << 20,
        ge=1,
        description="bytes of the bodies of all open requests; further ones get 429; lower it on a machine "
        "with little memory",
    )
    max_response_bytes: int = Field(
        128 << 20,
        ge=1,
        description="bytes of one response that is not streamed; a larger one gets 400, before generation "
        "where the size is certain; raise it for many logprobs or embeddings in one response",
    )
    max_response_bytes_in_flight: int = Field(
        512 << 20,
        ge=1,
        description="bytes of all open responses that are not streamed; beyond them 429; lower it on a "
        "machine with little memory",
    )
    upload_timeout_s: float = Field(
        30.0,
        gt=0,
        description="seconds for a request's head to arrive, and again for its body; raise it for slow links",
    )
    send_timeout_s: float = Field(
        30.0,
        gt=0,
        le=86400,
        description="seconds within which a client must read some of its response; otherwise it is "
        "disconnected, which frees its KV cells",
    )
    request_timeout_status: int = Field(
        408,
        description="status of a request that exceeds request_timeout_s, 408 or 499; set 499 behind a "
        "router, which runs a request that got 408 again",
    )
    timeout_keep_alive_s: float = Field(
        5.0,
        gt=0,
        description="seconds that a connection may be idle between two requests; raise it for clients that "
        "reuse connections seldom",
    )
    shutdown_timeout_s: float = Field(
        30.0,
        ge=0,
        description="seconds that open requests may continue after SIGTERM; a second signal ends them; raise "
        "it for long completions, below the time that your service manager waits",
    )

    # web UI, logs, traces
    chat_store: Path | None = Field(
        None,
        description="SQLite file for the web UI's chats (default: only the browser keeps them); set it to "
        "see the same chats from several browsers",
    )
    max_chat_bytes_per_key: int = Field(
        256 << 20,
        ge=1,
        description="bytes of one key's chats in chat_store; a write beyond them gets 400; raise it for "
        "chats with long attachments",
    )
    response_store: Path | None = Field(
        None,
        description="SQLite file for responses of /v1/responses (default: none is stored); set it for "
        "previous_response_id, background responses (also of the web UI) and reading a response again",
    )
    max_stored_response_bytes_per_key: int = Field(
        256 << 20,
        ge=1,
        description="bytes of one key's responses and their input in response_store; beyond them the least "
        "recently used are deleted; raise it to keep more",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info",
        description="lowest level that is logged; debug also logs probes and other reads; set debug to see "
        "them, warning to see only problems",
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        description="OpenTelemetry collector (OTLP over HTTP) that receives a span for each request "
        "(default: no tracing); set it to see where the time of requests goes, next to your "
        "other services",
    )

    @field_validator("api_key", mode="before")
    @classmethod
    def _keys(cls, value: Any) -> Any:
        """Read keys as `_one_or_many` does; reject an empty key, which anybody could send."""
        keys = cls._one_or_many(value) or ([value] if isinstance(value, str) else value)
        if isinstance(keys, (list, tuple)) and any(not str(key).replace(",", "").strip() for key in keys):
            raise ValueError("a key is empty; check that the shell variable with the key is set")
        return keys

    @field_validator("served_model_name", "allowed_origins", "allowed_hosts", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        """Read a comma-separated string (environment) or a list (YAML, repeated flags)."""
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())

    @field_validator("request_timeout_status")
    @classmethod
    def _timeout_status(cls, value: int) -> int:
        """Accept the HTTP status of a timeout, and the one that neither routers nor clients retry."""
        if value not in (408, 499):
            raise ValueError(f"{value} is not a status of a timeout; expected 408 or 499")
        return value

    @field_validator("root_path")
    @classmethod
    def _path(cls, value: str) -> str:
        """Remove the slash at the end; reject what is not the path of a URL."""
        path = value.rstrip("/")
        if not re.fullmatch(r"(/[\w.~-]+)*", path, re.ASCII):
            raise ValueError(f"{value!r} is not a path; expected one such as /llm")
        return path

    @field_validator("models", mode="before")
    @classmethod
    def _entries(cls, value: Any) -> Any:
        """Read a list of mappings (YAML), a YAML or JSON text per entry (flags), or one text
        (environment)."""
        try:
            value = yaml.safe_load(value) if isinstance(value, str) else value
            return tuple(yaml.safe_load(each) if isinstance(each, str) else each for each in value)
        except (yaml.YAMLError, TypeError) as e:
            raise ValueError(f"expected a list of {{name: ..., model: ...}} ({e})") from e
