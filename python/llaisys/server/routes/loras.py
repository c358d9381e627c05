"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: vLLM's routes for LoRA adapters at run time."""

from __future__ import annotations

import logging

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from llaisys.errors import NotFoundError, RejectedError
from llaisys.registry import ModelRegistry
from llaisys.server.access_log import client_id_of
from llaisys.server.http_errors import ApiError, error_responses
from llaisys.server.protocol import BodyRoute, text_of
from llaisys.server.request_schemas import LoadLoraRequest, UnloadLoraRequest
from llaisys.server.response_schemas import text_of_type
from llaisys.server.state import state_of

log = logging.getLogger("llaisys.server")
router = APIRouter(route_class=BodyRoute, responses=error_responses(403, 404))


@router.post("/v1/load_lora_adapter", response_class=Response, responses=text_of_type("text/plain"))
async def load_lora_adapter(body: LoadLoraRequest, request: Request) -> PlainTextResponse:
    """Load an adapter from a folder of the server, and serve it under its name."""
    models = _registry(request)
    name, path = text_of("lora_name", body.lora_name), text_of("lora_path", body.lora_path)
    if not name or not path:
        raise RejectedError("Both 'lora_name' and 'lora_path' must be provided.", param="lora_name")
    engine = models.find(body.base_model_name)
    if engine is None or body.base_model_name in engine.loras.names:
        raise RejectedError(
            f"base_model_name {body.base_model_name!r} is not a served model", param="base_model_name"
        )
    others = [each for each in models.names if each not in engine.loras.names]
    if name in others or name == "default":
        raise RejectedError(f"lora_name {name!r} is the name of a served model", param="lora_name")
    await engine.loras.load(name, path, in_place=body.load_inplace)
    log.info("loaded the LoRA adapter %r from %s for the key %r", name, path, client_id_of(request))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_class=Response, responses=text_of_type("text/plain"))
async def unload_lora_adapter(body: UnloadLoraRequest, request: Request) -> PlainTextResponse:
    """Refuse new requests of an adapter. Those that run continue, and the last one frees it."""
    name = text_of("lora_name", body.lora_name)
    engine = next((each for each in _registry(request).services if each.loras.find(name)), None)
    if engine is None:
        raise NotFoundError(f"The lora adapter '{name[:100]}' cannot be found.", param="lora_name")
    await engine.loras.unload(name)
    log.info("unloaded the LoRA adapter %r for the key %r", name, client_id_of(request))
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _registry(request: Request) -> ModelRegistry:
    """Return the models. Raises ApiError (403) unless clients may change adapters."""
    state = state_of(request)
    if not state.config.allow_runtime_lora_updating:
        raise ApiError(
            403,
            "This server lets no client load or unload LoRA adapters; start it with "
            "--allow-runtime-lora-updating.",
            code="lora_updating_disabled",
        )
    return state.registry()
