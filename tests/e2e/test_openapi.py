"""The served OpenAPI document, and schemathesis with it against a server.

Valid and invalid bodies, each method, each rule of keys and sequences of calls give no status 500, and no
response that the document does not declare.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from llaisys.server.http_errors import ANTHROPIC_PATH, OLLAMA_PATH
from serving import GOLDENS, Server, environment, serving

HERE = Path(__file__).parent
KEY = "sesame"
# Another seed generates other bodies. It is printed with the failures.
SEED = 6
# For each operation; `make test-long` has more.
N_EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "6"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve the tiny model with the stores that the routes need."""
    folder = tmp_path_factory.mktemp("openapi")
    shutil.copytree(GOLDENS / "qwen2-tied-bf16", folder / "tiny")
    (folder / "sessions").mkdir()
    flags = (
        "--dtype",
        "float32",
        "--num-kv-cells",
        "4096",
        "--max-num-seqs",
        "16",
        "--max-output-tokens",
        "16",
    )
    stores = ("--session-store", str(folder / "sessions"), "--chat-store", str(folder / "chats.db"))
    stores += ("--response-store", str(folder / "responses.db"))
    with serving(folder, str(folder / "tiny"), *flags, *stores, key=KEY) as made:
        yield made


def test_the_document_needs_the_key_and_has_every_route(server: Server) -> None:
    assert httpx.get(f"{server.url}/openapi.json", timeout=None).status_code == 401
    document = server.http.get("/openapi.json").json()
    routes = {
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/api/chat",
        "/v1/embeddings",
        "/tokenize",
        "/v1/sessions",
        "/metrics",
    }
    assert routes <= set(document["paths"])
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            prefixes = {ANTHROPIC_PATH: "AnthropicErrorAnswer", OLLAMA_PATH: "OllamaErrorAnswer"}
            found = [name for prefix, name in prefixes.items() if path.startswith(prefix)]
            answer = found[0] if found else "ErrorAnswer"
            schema = operation["responses"]["400"]["content"]["application/json"]["schema"]
            assert schema == {"$ref": f"#/components/schemas/{answer}"}
            is_open = path in ("/livez", "/health", "/ready")
            assert operation["security"] == ([] if is_open else [{"key": []}, {"x-api-key": []}])


@pytest.mark.timeout(900)  # a minute on two quiet cores
def test_schemathesis_finds_nothing(server: Server, tmp_path: Path) -> None:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "schemathesis.toml"), "run"),
        *(f"{server.url}/openapi.json", "-H", f"Authorization: Bearer {KEY}", "--no-color"),
        *("-H", f"x-api-key: {KEY}"),
        *("--seed", str(SEED), "--max-examples", str(N_EXAMPLES), "--generation-database", "none"),
        *("--suppress-health-check", "all", "--warnings", "off"),
    ]
    path = os.pathsep.join(sys.path)
    hooks = environment(PYTHONPATH=path, SCHEMATHESIS_HOOKS=str(HERE / "schemathesis_hooks.py"))
    done = subprocess.run(command, cwd=tmp_path, env=hooks, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"seed {SEED}\n{done.stdout}\n{done.stderr}"
    print(f"seed {SEED}")
    generated = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert generated is not None, done.stdout
    assert int(generated[1]) == int(generated[2]) > 1000
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens")
    paths += ("/v1/embeddings", "/tokenize", "/v1/sessions", "/v1/responses")
    paths += ("/api/chat", "/api/generate", "/api/embed")
    server.wait_logged(*(f'"path": "{path}", "status": 200' for path in paths))
    assert not re.search(r'"status": 5\d\d', server.log.read_text("utf-8"))
