"""GET /v1/models and /v1/models/{id}: lists the served model names."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from llaisys.server.http_errors import error_responses, model_not_found
from llaisys.server.response_schemas import ModelCard, ModelList
from llaisys.server.state import ServerState, state_of

router = APIRouter()


@router.get("/models", include_in_schema=False)
@router.get("/v1/models", response_model=ModelList)
async def list_models(request: Request) -> dict[str, Any]:
    """List every served name.

    Codex reads an array `models`, and needs its own instructions for each model in it. It is empty, so that
    Codex uses its default instructions. `stores_responses` tells the web UI whether it can offer background
    responses.
    """
    state = state_of(request)
    return {
        "object": "list",
        "data": [_card(state, name) for name in state.registry().names],
        "models": [],
        "stores_responses": state.responses is not None,
    }


@router.get("/v1/models/{name:path}", response_model=ModelCard, responses=error_responses(404))
async def show_model(request: Request, name: str) -> dict[str, Any]:
    """Show one served name, which may contain slashes; 404 for other names."""
    state = state_of(request)
    if name not in state.registry().names:
        raise model_not_found(name)
    return _card(state, name)


def _card(state: ServerState, name: str) -> dict[str, Any]:
    """Return a model card. `root` is the model's first served name, never a path; the `parent` of a LoRA
    adapter, too."""
    engine = state.registry().find(name)
    assert engine is not None
    is_lora = name not in engine.model_names
    return {
        "id": name,
        "object": "model",
        "created": state.created_s,
        "owned_by": "llaisys",
        "root": name if is_lora else engine.model_names[0],
        "parent": engine.model_names[0] if is_lora else None,
        "max_model_len": engine.max_model_len,
        "default_sampling_params": engine.default_sampling_params,
        "permission": [],
    }
