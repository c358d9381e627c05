"""Two models in one server with the openai client: each name gets the completions of its model."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import yaml

from golden import load_golden
from llaisys.engine.worker import inspect_model
from llaisys.text.tokenizer import load_tokenizer
from serving import GOLDENS, Server, serving

FOLDERS = {"qwen2": "qwen2-tied-bf16", "llama": "llama-untied-bf16"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve `qwen2`, loaded at the start, and `llama`, loaded in its own process at its first request."""
    folder = tmp_path_factory.mktemp("models")
    own = {"llama": {"preload": False, "idle_unload_s": 0.2, "engine_process": True, "num_kv_cells": 256}}
    models = [
        {"name": name, "model": str(GOLDENS / golden), **own.get(name, {})}
        for name, golden in FOLDERS.items()
    ]
    config = {"dtype": "float32", "num_kv_cells": 512, "generation_config": "vllm", "models": models}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with serving(folder, None, "--config", str(folder / "config.yaml")) as made:
        yield made


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


def greedy(server: Server, model: str) -> tuple[str, str]:
    """Return the model name of the response, and its completion of the first golden prompt."""
    body = {
        "prompt": load_golden(GOLDENS / FOLDERS[model]).prompts[0],
        "max_tokens": 24,
        "temperature": 0,
        "logprobs": 0,
        "ignore_eos": True,
    }
    response = server.http.post("/v1/completions", json={**body, "model": model}).json()
    return response["model"], response["choices"][0]["text"]


def expected(model: str) -> str:
    """Return the greedy ids of transformers as text; both golden models have the same tokenizer."""
    folder = GOLDENS / FOLDERS[model]
    return load_tokenizer(inspect_model(folder)).decode(load_golden(folder).greedy[0], True)


def test_both_are_listed_before_the_second_is_loaded(server: Server, client: openai.OpenAI) -> None:
    assert server.model == "qwen2,llama"
    assert [card.id for card in client.models.list()] == ["qwen2", "llama"]
    assert client.models.retrieve("llama").id == "llama"
    assert server.metric("llaisys:kv_cells", model_name="qwen2") == 512


def test_many_first_requests_of_a_model_load_it_once(server: Server) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = ["llama", "qwen2"] * 4
        responses = list(pool.map(lambda name: greedy(server, name), names))
    assert responses == [(name, expected(name)) for name in names]
    # Once, and once more for each time that it was unloaded.
    text = server.log.read_text("utf-8")
    assert text.count("KV cache: 256 cells") - text.count("unloaded llama") in (0, 1)
    assert server.metric("vllm:generation_tokens_total", model_name="llama") == 4 * 24
    assert server.metric("vllm:generation_tokens_total", model_name="qwen2") == 4 * 24


def test_an_idle_model_is_unloaded_and_loaded_again(server: Server) -> None:
    greedy(server, "llama")
    server.until("llaisys:kv_cells", 0, model_name="llama")
    assert server.http.get("/ready").status_code == 200
    assert greedy(server, "llama") == ("llama", expected("llama"))
    assert server.metric("llaisys:kv_cells", model_name="qwen2") == 512


def test_an_empty_name_is_the_first_model_and_an_unknown_one_a_404(client: openai.OpenAI) -> None:
    assert client.completions.create(model="", prompt="Hi", max_tokens=1).model == "qwen2"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="mistral", prompt="Hi", max_tokens=1)
    chat = client.chat.completions.create(
        model="llama", messages=[{"role": "user", "content": "Hi"}], max_tokens=2, stream=True
    )
    assert {chunk.model for chunk in chat} == {"llama"}
