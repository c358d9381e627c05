"""A server with the real web UI whose model replays a recorded completion at a steady rate.

`python tests/replay.py` serves it until it is killed; its first line is its address.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from llaisys.server.webui import static

TOKENS_PER_S = 200
PARAGRAPH = "The tide table of a harbour is made from a year of readings, and every harbour needs its own. "
CODE = "\n".join(
    [
        "```python",
        "def tide(t, parts):",
        '    """Return the height of the tide at a time."""',
        *(f"    t += cos({i} * t)  # the part of row {i}" for i in range(20)),
        "    return sum(a * cos(w * t + p) for a, w, p in parts)",
        "```",
    ]
)
TABLE = "| part | hours | speed |\n|------|------:|-------|\n" + "\n".join(
    f"| M{i} | {12.42 / i:.2f} | \\(\\omega_{{{i}}}\\) |" for i in range(1, 25)
)
MATHS = "$$\nh(t) = \\sum_{i=1}^{n} a_i \\cos\\left( \\frac{2 \\pi t}{T_i} + \\varphi_i \\right)\n$$"
ANSWER = "\n\n".join(
    part
    for i in range(6)
    for part in (
        f"## Part {i + 1}",
        PARAGRAPH * 3,
        f"- **one**: {PARAGRAPH}\n- two",
        CODE,
        TABLE,
        f"With \\(x_{i} < 1\\): {PARAGRAPH}",
        MATHS,
    )
)


def pieces() -> list[str]:
    """Return the completion in pieces of four characters, about a token."""
    return [ANSWER[at : at + 4] for at in range(0, len(ANSWER), 4)]


async def frames() -> AsyncIterator[str]:
    """Yield a frame every 1 / TOKENS_PER_S seconds, at absolute times: a late one does not delay the rest."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    for i, piece in enumerate(pieces()):
        await asyncio.sleep(max(0.0, start + i / TOKENS_PER_S - loop.time()))
        usage = {"prompt_tokens": 9, "completion_tokens": i + 1}
        yield _frame({"choices": [{"delta": {"content": piece}}], "usage": usage})
    yield _frame({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    yield "data: [DONE]\n\n"


def _frame(chunk: dict[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"


app = FastAPI()
app.state.webui = static.load_webui()
app.include_router(static.router)


@app.get("/v1/models")
async def models() -> dict[str, Any]:
    """Return one model."""
    return {"data": [{"id": "replay", "max_model_len": 65536}]}


@app.get("/metrics")
async def metrics() -> Response:
    """Return no metrics."""
    return PlainTextResponse("")


@app.post("/v1/chat/completions")
async def chat(request: Request) -> Response:
    """Return the recorded completion for any request."""
    await request.body()
    return StreamingResponse(frames(), media_type="text/event-stream")


def main() -> None:
    """Serve on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


if __name__ == "__main__":
    main()
