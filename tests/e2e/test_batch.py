"""`llaisys run-batch` and `llaisys config show` in processes: a batch gives the responses of a server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from serving import COMMAND, END_S, GOLDENS, Server, environment

MODEL = str(GOLDENS / "qwen2-tied-bf16")
CHAT = {"messages": [{"role": "user", "content": "Hello there"}], "temperature": 0, "max_tokens": 8}
BODIES = [
    ("/v1/chat/completions", {**CHAT, "logprobs": True}),
    ("/v1/completions", {"prompt": ["Hello", "there"], "temperature": 0, "max_tokens": 4}),
    ("/v1/embeddings", {"input": ["Hello there", "Something else"]}),
    ("/v1/completions", {"prompt": "Hello", "temperature": 9}),
]


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment(**variables), timeout=END_S
    )


def comparable(body: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a response that do not differ between calls."""
    return {name: value for name, value in body.items() if name not in ("id", "created", "usage")}


def test_a_batch_gives_the_responses_of_a_server(tiny: Server, tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"custom_id": f"line {i}", "method": "POST", "url": url, "body": {**body, "model": "tiny"}}
        )
        for i, (url, body) in enumerate(BODIES * 5)
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join([*lines, "no request"]), "utf-8")
    flags = ("--served-model-name", "tiny", "--dtype", "float32", "--num-kv-cells", "512")
    done = run("run-batch", MODEL, *flags, "-i", str(source), "-o", str(target))
    assert (done.returncode, done.stderr) == (0, "21 requests, 6 of them failed\n")
    *results, bad = map(json.loads, target.read_text("utf-8").splitlines())
    assert [result["custom_id"] for result in results] == [f"line {i}" for i in range(20)]
    assert (bad["custom_id"], bad["response"], bad["error"]["code"]) == (None, None, "invalid_json")
    for i, result in enumerate(results):
        url, body = BODIES[i % 4]
        response = tiny.http.post(url, json=body)
        assert result["response"]["status_code"] == response.status_code
        assert comparable(result["response"]["body"]) == comparable(response.json())


def test_a_model_that_cannot_be_loaded_is_reported(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("{}\n", "utf-8")
    earlier = tmp_path / "out.jsonl"
    earlier.write_text("earlier results", "utf-8")
    done = run("run-batch", "no-such-model", "-i", str(source), "-o", str(earlier))
    assert earlier.read_text("utf-8") == "earlier results"
    assert done.returncode == 1
    assert done.stderr.startswith("llaisys run-batch: no model 'no-such-model'")


def test_config_show_prints_values_and_sources_without_secrets(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max_num_seqs: 7\n", "utf-8")
    done = run("config", "show", "--json", "--config", str(file), LLAISYS_API_KEY="sk-secret")
    shown = json.loads(done.stdout)
    assert shown["max_num_seqs"] == {"value": 7, "source": "file"}
    assert shown["api_key"] == {"value": ["***"], "source": "environment"}
    assert "sk-secret" not in done.stdout + done.stderr
