"""GET /v1/models."""

from __future__ import annotations

import httpx

from fakes.service import FakeService


async def test_every_served_model_name_is_listed(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [card["id"] for card in body["data"]] == ["tiny", "alias/of-tiny"]
    card = body["data"][0]
    assert (card["object"], card["root"], card["max_model_len"]) == ("model", "tiny", 64)
    assert isinstance(card["created"], int)


async def test_a_card_has_the_sampling_defaults_of_the_model(
    engine: FakeService, client: httpx.AsyncClient
) -> None:
    card = (await client.get("/v1/models/tiny")).json()
    assert card["default_sampling_params"] == {}
    engine.default_sampling_params = {"temperature": 0.2, "top_k": 40}
    for name in engine.model_names:
        card = (await client.get(f"/v1/models/{name}")).json()
        assert card["default_sampling_params"] == {"temperature": 0.2, "top_k": 40}


async def test_a_model_name_may_contain_a_slash(client: httpx.AsyncClient) -> None:
    response = await client.get("/v1/models/alias/of-tiny")
    assert response.json()["id"] == "alias/of-tiny"


async def test_codex_finds_a_list_of_models(client: httpx.AsyncClient) -> None:
    """Codex fails without the list, and would use a model's (missing) instructions if one were in it."""
    assert (await client.get("/v1/models")).json()["models"] == []
