"""GET /api/tags, /api/ps, /api/version and POST /api/show: the served models in Ollama's format."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from llaisys.async_llm import AsyncLLM
from llaisys.server.ollama.schemas import OllamaShowRequest
from llaisys.server.protocol import OllamaRoute
from llaisys.server.response_body import Json
from llaisys.server.routes.ollama import OLLAMA_ERRORS, find_model
from llaisys.server.state import ServerState, state_of

# The version of Ollama whose API these routes serve. Clients compare it: VS Code needs 0.6.4.
OLLAMA_VERSION = "0.20.0"
# A model that no idle time unloads; Ollama shows such a time for `keep_alive` -1.
NEVER = "2318-01-01T00:00:00Z"
UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))

router = APIRouter(route_class=OllamaRoute)


@router.get("/api/version", responses=OLLAMA_ERRORS)
async def version() -> dict[str, str]:
    """Return the version of Ollama's API that is served."""
    return {"version": OLLAMA_VERSION}


@router.get("/api/tags", responses=OLLAMA_ERRORS)
async def tags(request: Request) -> dict[str, Any]:
    """List every served name."""
    state = state_of(request)
    return {"models": [_row(state, name) for name in state.registry().names]}


@router.get("/api/ps", responses=OLLAMA_ERRORS)
async def loaded(request: Request) -> dict[str, Any]:
    """List the loaded models. All weights and KV cells of a model on the CPU are in its memory."""
    state = state_of(request)
    rows = []
    for name in state.registry().names:
        engine = state.serving(name)
        if engine.is_loaded():
            vram = {"size_vram": engine.model_info.weight_bytes if engine.config.device == "cuda" else 0}
            rows.append(
                {
                    **_row(state, name),
                    **vram,
                    "expires_at": NEVER,
                    "context_length": engine.max_model_len,
                }
            )
    return {"models": rows}


@router.post("/api/show", responses=OLLAMA_ERRORS)
async def show(body: OllamaShowRequest, request: Request) -> dict[str, Any]:
    """Describe a model: its details, capabilities and chat template."""
    state = state_of(request)
    engine, _ = find_model(state, body.model or body.name)
    info = engine.model_info
    prefix = _family(engine)
    return {
        "details": _details(engine),
        "model_info": {
            "general.architecture": prefix,
            "general.parameter_count": info.n_parameters,
            f"{prefix}.context_length": engine.max_model_len,
            f"{prefix}.embedding_length": info.d_model,
            f"{prefix}.block_count": info.n_layers,
            f"{prefix}.feed_forward_length": info.d_ff,
            f"{prefix}.attention.head_count": info.n_heads,
            f"{prefix}.attention.head_count_kv": info.n_kv_heads,
        },
        "capabilities": _capabilities(engine),
        "template": engine.template_text,
        "parameters": "\n".join(f"{key} {value}" for key, value in engine.default_sampling_params.items()),
        "modified_at": _modified_at(state),
    }


def _row(state: ServerState, name: str) -> Json:
    """Return the row of a served name. `digest` tells checkpoints apart; it is not a hash of the weights."""
    engine = state.registry().find(name)
    assert engine is not None
    info = engine.model_info
    facts = (Path(info.path).name, info.architecture, info.dtype, info.n_parameters, info.weight_bytes)
    return {
        "name": name,
        "model": name,
        "modified_at": _modified_at(state),
        "size": info.weight_bytes,
        "digest": hashlib.sha256(repr(facts).encode()).hexdigest(),
        "details": _details(engine),
    }


def _details(engine: AsyncLLM) -> Json:
    info = engine.model_info
    return {
        "parent_model": "",
        "format": info.file_format,
        "family": _family(engine),
        "families": [_family(engine)],
        "parameter_size": _shortened(info.n_parameters),
        "quantization_level": info.dtype.upper(),
    }


def _family(engine: AsyncLLM) -> str:
    """Return the architecture as Ollama names it: `llama`."""
    return engine.model_info.architecture.removesuffix("ForCausalLM").lower()


def _capabilities(engine: AsyncLLM) -> list[str]:
    """Return what requests may ask of a model, by Ollama's names."""
    info, formats = engine.model_info, engine.output_formats
    if not info.generates:
        return [] if info.has_score_head else ["embedding"]
    optional = {"tools": formats.tool is not None, "thinking": formats.has_reasoning}
    return ["completion", *(name for name, given in optional.items() if given), "embedding"]


def _modified_at(state: ServerState) -> str:
    """Return the server's start, because a model has no time of its own."""
    return datetime.fromtimestamp(state.created_s, timezone.utc).isoformat().replace("+00:00", "Z")


def _shortened(n_parameters: int) -> str:
    """Return a number as Ollama writes it: 134.52M."""
    unit, letter = next((each for each in UNITS if n_parameters >= each[0]), (1, ""))
    return f"{n_parameters / unit:.4g}{letter}"
