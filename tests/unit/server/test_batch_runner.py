"""`run-batch` on a scripted engine: one result per line, in order, from the handlers of the server."""

from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from fakes.service import FakeService, Piece
from llaisys.cli.main import main
from llaisys.config import Config
from llaisys.errors import EngineDeadError
from llaisys.registry import ModelRegistry
from llaisys.server import batch_runner
from llaisys.server.batch_runner import BatchReport, run_batch

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def configs(monkeypatch: pytest.MonkeyPatch, engine: FakeService) -> list[Config]:
    """Replace the loaded engine by the scripted one; return the configurations used to start it."""
    started: list[Config] = []

    async def start(config: Config) -> ModelRegistry:
        started.append(config)
        return ModelRegistry([engine])  # type: ignore[list-item]  # the fake has AsyncLLM's surface

    monkeypatch.setattr(batch_runner.ModelRegistry, "start", start)
    return started


def line(custom_id: str, url: str, body: Any, **more: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body, **more}) + "\n"


async def replies(lines: list[str], config: Config | None = None) -> tuple[BatchReport, list[dict[str, Any]]]:
    out = io.StringIO()
    report = await run_batch(config or Config(), lines, out)
    return report, [json.loads(each) for each in out.getvalue().splitlines()]


@pytest.mark.usefixtures("configs")
async def test_every_endpoint_gives_the_results_of_http() -> None:
    lines = [
        line("a", "/v1/chat/completions", CHAT),
        "\n",
        line("b", "/v1/completions", {"prompt": "Hi"}),
        line("c", "/v1/embeddings", {"input": ["Hi", "i"], "model": "alias/of-tiny"}),
        line("d", "/v1/rerank", {"query": "Hi", "documents": ["Hi"]}),
        line("e", "/v1/score", {"text_1": "Hi", "text_2": "Hi"}),
    ]
    report, results = await replies(lines)
    assert report == BatchReport(5, 0)
    assert [result["custom_id"] for result in results] == ["a", "b", "c", "d", "e"]
    assert len({result["id"] for result in results}) == 5
    assert all(result["error"] is None for result in results)
    responses = [result["response"] for result in results]
    assert [response["status_code"] for response in responses] == [200] * 5
    assert all(response["request_id"] for response in responses)
    bodies = [response["body"] for response in responses]
    assert bodies[0]["choices"][0]["message"]["content"] == "Hello!"
    assert bodies[1]["choices"][0]["text"] == "Hello!"
    assert [entry["embedding"] for entry in bodies[2]["data"]] == [[72, 105], [105]]
    assert [entry["index"] for entry in bodies[3]["results"]] == [0]
    assert len(bodies[4]["data"]) == 1


@pytest.mark.usefixtures("configs")
@pytest.mark.parametrize(
    ("bad", "custom_id", "code"),
    [
        ("{", None, "invalid_json"),
        ("[" * 100_000, None, "invalid_json"),
        ("7", None, "missing_custom_id"),
        ('{"custom_id": 7}', None, "missing_custom_id"),
        (line("x", "/v1/models", {}), "x", "invalid_url"),
        (line("x", "/v1/completions", {}, method="GET"), "x", "invalid_url"),
        (line("x", "/v1/completions", "Hi"), "x", "invalid_body"),
        (line("x", "/v1/completions", {"prompt": "Hi", "stream": True}), "x", "invalid_body"),
    ],
)
async def test_an_invalid_line_gets_an_error_and_the_others_continue(
    bad: str, custom_id: str | None, code: str
) -> None:
    good = line("good", "/v1/completions", {"prompt": "Hi"})
    report, results = await replies([good, bad, good])
    assert report == BatchReport(3, 1)
    assert (results[1]["custom_id"], results[1]["response"]) == (custom_id, None)
    assert results[1]["error"]["code"] == code
    assert [results[i]["response"]["status_code"] for i in (0, 2)] == [200, 200]


@pytest.mark.usefixtures("configs")
async def test_a_rejected_request_has_the_error_of_the_server() -> None:
    report, results = await replies(
        [
            line("a", "/v1/completions", {"prompt": "Hi", "temperature": 9}),
            line("b", "/v1/completions", {"prompt": "Hi", "model": "other"}),
            line("c", "/v1/completions", {"prompt": "half \ud800"}),
        ]
    )
    assert report == BatchReport(3, 3)
    assert [result["response"]["status_code"] for result in results] == [400, 404, 400]
    errors = [result["response"]["body"]["error"] for result in results]
    assert [error["param"] for error in errors] == ["temperature", "model", "prompt"]


async def test_order_is_kept_and_concurrency_is_bounded(engine: FakeService, configs: list[Config]) -> None:
    gate = asyncio.Event()
    engine.script = [Piece(["x"], "stop", gate=gate)]
    lines = [line(f"{i}", "/v1/completions", {"prompt": f"{i}"}) for i in range(9)]
    running = asyncio.ensure_future(replies(lines, Config(max_num_seqs=4)))
    for _ in range(200):  # iterations of the event loop; a line needs about twenty
        await asyncio.sleep(0)
    assert len(engine.calls) == 4
    gate.set()
    _, results = await running
    assert [result["custom_id"] for result in results] == [f"{i}" for i in range(9)]
    (config,) = configs
    assert (config.max_num_queued_reqs, config.request_timeout_s) == (4 * 128, math.inf)
    await replies([], Config(request_timeout_s=5))
    assert configs[-1].request_timeout_s == 5


@pytest.mark.usefixtures("configs")
async def test_a_large_response_is_written_in_pieces(engine: FakeService) -> None:
    """A piece may end inside a character. The response bytes of all lines together are not bounded."""
    engine.script = [Piece(["x漢😀"] * 10_000)] * 3 + [Piece(["x"], "stop")]
    lines = [line(f"{i}", "/v1/completions", {"prompt": "Hi"}) for i in range(3)]
    report, results = await replies(lines, Config(max_response_bytes_in_flight=1))
    assert report == BatchReport(3, 0)
    for result in results:
        assert result["response"]["body"]["choices"][0]["text"] == "x漢😀" * 30_000 + "x"


@pytest.mark.usefixtures("configs")
async def test_a_dead_engine_fails_the_batch_after_the_last_line(engine: FakeService) -> None:
    engine.dead = True
    out = io.StringIO()
    with pytest.raises(EngineDeadError):
        await run_batch(Config(), [line("a", "/v1/completions", {"prompt": "Hi"})], out)
    assert json.loads(out.getvalue())["response"]["status_code"] == 503


@pytest.mark.usefixtures("configs")
async def test_canceling_a_batch_cancels_its_running_requests(engine: FakeService) -> None:
    engine.script = [Piece(["x"], "stop", gate=asyncio.Event())]
    running = asyncio.ensure_future(replies([line("a", "/v1/completions", {"prompt": "Hi"})]))
    for _ in range(200):  # as above
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert engine.calls[0].ended


def test_unusable_input_and_output_files_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "in.jsonl"
    there.write_text("", "utf-8")
    for source, target, words in (
        (there, there, "both the input and the output"),
        (tmp_path / "none", tmp_path / "out", "cannot read"),
        (there, tmp_path / "none" / "out", "cannot write"),
    ):
        assert main(["run-batch", "-i", str(source), "-o", str(target)]) == 1
        assert words in capsys.readouterr().err
