"""LoRA adapters offline and in a real server: the outputs of PEFT, routing by name, load and unload while
requests run."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llaisys import LLM, LoRARequest, SamplingParams
from llaisys.errors import RejectedError, UnsupportedError
from serving import Server, serving

DATA = Path(__file__).parents[1] / "data"
BASE = DATA / "goldens" / "qwen2-tied-bf16"
DRAFT = str(DATA / "goldens" / "draft_qwen2_bf16")
NAMES = ("lora_qwen2_r4", "lora_qwen2_r16")
GOLDENS = {name: np.load(DATA / "loras" / name / "golden.npz") for name in NAMES}
N = 24
GREEDY = SamplingParams(temperature=0, max_tokens=N, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "enable_lora": True, "max_loras": 2}


def path_of(name: str) -> str:
    return str(DATA / "loras" / name)


def adapter(name: str) -> LoRARequest:
    return LoRARequest(name, 1, path_of(name))


def prompt(i: int, name: str = NAMES[0]) -> list[int]:
    ids: list[int] = GOLDENS[name][f"prompt_{i}"].tolist()
    return ids


@cache
def continuations() -> dict[tuple[str | None, int], list[int]]:
    """Return the continuation of each prompt with each adapter, computed alone and without a prefix cache.

    Those in a golden are PEFT's.
    """
    made = {}
    with LLM(str(BASE), **SETTINGS, enable_prefix_caching=False) as llm:

        def run(name: str | None, ids: list[int]) -> list[int]:
            lora = adapter(name) if name else None
            return list(
                llm.generate([ids], GREEDY, lora_request=lora, use_tqdm=False)[0].outputs[0].token_ids
            )

        for i in range(3):
            for name in (None, *NAMES):
                made[name, i] = run(name, prompt(i))
            assert made[None, i] == GOLDENS[NAMES[0]][f"base_greedy_{i}"].tolist()
            assert made[NAMES[0], i] == GOLDENS[NAMES[0]][f"greedy_{i}"].tolist()
            assert run(NAMES[1], prompt(i, NAMES[1])) == GOLDENS[NAMES[1]][f"greedy_{i}"].tolist()
    return made


def wanted(name: str | None, i: int) -> list[int]:
    return continuations()[name, i]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"max_num_batched_tokens": 7},
        # Requests are preempted.
        {"num_kv_cells": 128, "max_model_len": 100},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        # The second call finds the outputs of the first one, also those of the other adapter.
        {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
        # Drafts come from a model without adapters.
        {"speculative_config": {"method": "draft_model", "model": DRAFT, "num_speculative_tokens": 3}},
        {"engine_process": True},
        {"num_kv_streams": 2},
    ],
    ids=["plain", "chunks", "preemption", "ngram", "suffix", "draft model", "process", "streams"],
)
def test_each_prompt_of_a_call_has_its_adapter(more: dict[str, Any]) -> None:
    """Also twice, from cached prefixes: an adapter or the base never continues a prefix of another."""
    names = [None, *NAMES] * 3
    prompts = [{"prompt_token_ids": prompt(i)} for i in range(3) for _ in range(3)]
    loras = [adapter(name) if name else None for name in names]
    with LLM(str(BASE), **SETTINGS, **more) as llm:
        runs = [llm.generate(prompts, GREEDY, lora_request=loras, use_tqdm=False) for _ in range(2)]
    for run in runs:
        for k, (output, name) in enumerate(zip(run, names, strict=True)):
            assert list(output.outputs[0].token_ids) == wanted(name, k // 3)


def test_choices_share_the_prompt_of_their_adapter() -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=8, logprobs=2)
    with LLM(str(BASE), **SETTINGS) as llm:
        forked = llm.generate([prompt(2)], params, lora_request=adapter(NAMES[1]), use_tqdm=False)
        assert llm.reset_prefix_cache()
        again = llm.generate([prompt(2)], params, lora_request=adapter(NAMES[1]), use_tqdm=False)
        other = llm.generate([prompt(2)], params, lora_request=adapter(NAMES[0]), use_tqdm=False)
    assert forked[0].outputs == again[0].outputs
    assert forked[0].outputs != other[0].outputs


def test_embeddings_and_scores_have_their_adapter() -> None:
    """Each as alone, and as the adapter that a GGUF file or a folder has; also from cached prefixes."""
    names = [None, *NAMES, None, NAMES[0]]
    loras = [adapter(name) if name else None for name in names]
    with LLM(str(BASE), **SETTINGS) as llm:
        prompts = [{"prompt_token_ids": prompt(2)}] * len(names)
        for _ in range(2):
            made = llm.embed(prompts, lora_request=loras, use_tqdm=False)
            vectors = [output.outputs.embedding for output in made]
            alone = [
                llm.embed(prompts[:1], lora_request=lora, use_tqdm=False)[0].outputs.embedding
                for lora in loras
            ]
            assert vectors == alone
            assert (vectors[0], vectors[1]) == (vectors[3], vectors[4])
            assert vectors[0] != vectors[1] != vectors[2] != vectors[0]
        (encoded,) = llm.encode(prompts[:1], pooling_task="embed", lora_request=loras[1], use_tqdm=False)
        assert encoded.outputs.data.tolist() == vectors[1]
        pair = ({"prompt_token_ids": prompt(1)}, prompts[0])
        plain, adapted = (llm.score(*pair, lora_request=lora, use_tqdm=False) for lora in loras[:2])
        assert plain[0].outputs.score != adapted[0].outputs.score
        assert llm.score(*pair, lora_request=loras[1], use_tqdm=False) != plain
        with pytest.raises(RejectedError, match="1 prompts and 2 lora_request"):
            llm.embed(prompts[:1], lora_request=loras[:2])


def test_what_is_refused() -> None:
    is_off = pytest.raises(UnsupportedError, match="LoRA is off; set enable_lora")
    with LLM(str(BASE), dtype="float32", device="cpu") as llm, is_off:
        llm.generate([[1]], GREEDY, lora_request=adapter(NAMES[0]))
    with LLM(str(BASE), **{**SETTINGS, "max_loras": 1, "max_lora_rank": 8}) as llm:
        with pytest.raises(RejectedError, match="rank 16, max_lora_rank is 8"):
            llm.generate([[1]], GREEDY, lora_request=adapter(NAMES[1]))
        with pytest.raises(RejectedError, match="names 2 adapters, max_loras is 1"):
            llm.generate([[1], [2]], GREEDY, lora_request=[adapter(name) for name in NAMES])
        with pytest.raises(RejectedError, match="lora_path of 'x' is empty"):
            llm.generate([[1]], GREEDY, lora_request=LoRARequest("x"))
        with pytest.raises(RejectedError, match="2 prompts and 1 lora_request"):
            llm.generate([[1], [2]], GREEDY, lora_request=[None])
    for more, says in (
        ({"tensor_parallel_size": 2, "num_threads": 2}, "tensor_parallel_size 2"),
        ({"device": "cuda"}, "cuda"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            LLM(str(BASE), **{**SETTINGS, **more})
    with pytest.raises(UnsupportedError, match="enable_lora is not supported for an encoder"):
        LLM(str(DATA / "goldens" / "bert_embed_f32"), enable_lora=True)


def flags(*more: str) -> tuple[str, ...]:
    modules = [f"{NAMES[0]}={path_of(NAMES[0])}", json.dumps({"name": "r16", "path": path_of(NAMES[1])})]
    settings = ("--dtype", "float32", "--device", "cpu", "--enable-lora", "--max-loras", "4")
    return (*settings, "--served-model-name", "base", *more, "--lora-modules", *modules)


def complete(server: Server, model: str, ids: list[int], **more: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": ids, "max_tokens": N, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/completions", json={**body, "return_token_ids": True, **more})
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json()
    return made


def ids_of(made: dict[str, Any]) -> list[int]:
    ids: list[int] = made["choices"][0]["token_ids"]
    return ids


@pytest.mark.parametrize("more", [(), ("--engine-process",)], ids=["thread", "process"])
def test_a_server_routes_by_the_model_of_a_request(tmp_path: Path, more: tuple[str, ...]) -> None:
    store = ("--session-store", str(tmp_path / "store"), "--allow-runtime-lora-updating")
    with serving(tmp_path, str(BASE), *flags(*more, *store)) as server:
        http = server.http
        cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
        assert [*cards] == ["base", NAMES[0], "r16"]
        assert [(card["parent"], card["root"]) for card in cards.values()] == [
            (None, "base"),
            ("base", NAMES[0]),
            ("base", "r16"),
        ]
        named: list[tuple[str, str | None]] = [("base", None), (NAMES[0], NAMES[0]), ("r16", NAMES[1])]
        for _ in range(2):
            for model, name in named:
                made = complete(server, model, prompt(2))
                assert (made["model"], ids_of(made)) == (model, wanted(name, 2))
        # The last prompts were cached, each for itself.
        assert complete(server, "r16", prompt(2))["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        # Every protocol routes alike: the adapter changes the text.
        texts: dict[str, list[str]] = {}
        message = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12, "temperature": 0}
        for model, _ in named:
            options = {"temperature": 0, "num_predict": 12}
            ollama = {"model": model, "messages": message["messages"], "stream": False, "options": options}
            tagged = {**ollama, "model": f"{model}:latest"}
            texts[model] = [
                http.post("/v1/chat/completions", json={"model": model, **message}).json()["choices"][0][
                    "message"
                ]["content"],
                http.post("/v1/messages", json={"model": model, **message}).json()["content"][0]["text"],
                http.post(
                    "/v1/responses",
                    json={"model": model, "input": "Hi", "max_output_tokens": 16, "temperature": 0},
                ).json()["output"][0]["content"][0]["text"][:40],
                http.post("/api/chat", json=ollama).json()["message"]["content"],
                http.post("/api/chat", json=tagged).json()["message"]["content"],
                str(http.post("/v1/embeddings", json={"model": model, "input": "Hi"}).json()["data"]),
            ]
        for of_protocol in zip(*texts.values(), strict=True):
            assert len(set(of_protocol)) == 3
        assert all(each[0] == each[1] == each[3] == each[4] for each in texts.values())
        missing = http.post("/v1/completions", json={"model": "nope", "prompt": "x"})
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        # A session belongs to the contents of its adapter.
        complete(server, "r16", prompt(2), session_id="chat")
        assert http.post("/v1/sessions/chat/save", json={"file": "f"}).status_code == 200
        assert http.post("/v1/sessions/same/restore", json={"file": "f"}).status_code == 200
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "r16"}).status_code == 200
        refused = http.post("/v1/sessions/other/restore", json={"file": "f"})
        assert refused.status_code == 400
        assert "computed with the LoRA adapter 'r16'" in refused.json()["error"]["message"]
        assert complete(server, "base", prompt(1), session_id="other") is not None
        assert server.stop() == 0


def test_load_and_unload_while_requests_run(tmp_path: Path) -> None:
    more = ("--allow-runtime-lora-updating", "--max-num-batched-tokens", "16", "--max-model-len", "500")
    with serving(tmp_path, str(BASE), *flags(*more)) as server:
        http = server.http

        def load(name: str, path: str, **body: Any) -> Any:
            return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path, **body})

        def unload(name: str) -> Any:
            return http.post("/v1/unload_lora_adapter", json={"lora_name": name})

        loaded = load("sql", path_of(NAMES[1]))
        assert (loaded.status_code, loaded.text) == (
            200,
            "Success: LoRA adapter 'sql' added successfully.",
        )
        assert load("sql", path_of(NAMES[1])).status_code == 400
        assert load("base", path_of(NAMES[1])).status_code == 400
        assert load("bad", str(tmp_path)).json()["error"]["message"].endswith("no adapter_config.json")
        assert "must be provided" in load("", "").json()["error"]["message"]
        assert unload("nope").status_code == 404
        want = wanted(NAMES[1], 2)
        with ThreadPoolExecutor(8) as pool:
            long = [pool.submit(complete, server, "sql", prompt(2), max_tokens=300) for _ in range(4)]
            server.wait_for(lambda: server.metric("vllm:num_requests_running") > 0)
            traffic = [
                pool.submit(complete, server, model, prompt(2)) for model in ("base", NAMES[0], "r16") * 2
            ]
            unloaded = unload("sql")
            assert unloaded.text == "Success: LoRA adapter 'sql' removed successfully."
            # New requests are refused, those that run end as if nothing had happened.
            refused = http.post("/v1/completions", json={"model": "sql", "prompt": "x"})
            assert refused.status_code == 404
            assert all(ids_of(each.result())[:N] == want for each in long)
            got = [ids_of(each.result()) for each in traffic]
        assert got == [wanted(None, 2), wanted(NAMES[0], 2), wanted(NAMES[1], 2)] * 2
        # Changed contents under the same name and path never continue cached prefixes.
        folder = tmp_path / "changing"
        shutil.copytree(path_of(NAMES[0]), folder)
        assert load("sql", str(folder)).status_code == 200
        assert ids_of(complete(server, "sql", prompt(2))) == wanted(NAMES[0], 2)
        shutil.rmtree(folder)
        shutil.copytree(path_of(NAMES[1]), folder)
        assert load("sql", str(folder), load_inplace=True).status_code == 200
        assert ids_of(complete(server, "sql", prompt(2))) == want
        assert server.stop() == 0


def test_clients_may_not_change_adapters_by_default(tmp_path: Path) -> None:
    with serving(tmp_path, str(BASE), *flags()) as server:
        for route in ("load", "unload"):
            body = {"lora_name": "r16", "lora_path": path_of(NAMES[0])}
            answer = server.http.post(f"/v1/{route}_lora_adapter", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "lora_updating_disabled")
        assert server.stop() == 0
