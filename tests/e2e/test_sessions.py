"""Sessions, cancellation and timelines of a server, with the engine on a thread and in a process."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving import long_model, serving
from sse import events


@pytest.mark.parametrize("flags", [(), ("--engine-process",)])
def test_sessions_cancel_and_timeline(tmp_path: Path, flags: tuple[str, ...]) -> None:
    store = tmp_path / "store"
    settings = ("--num-kv-cells", "65536", "--dtype", "float32", "--session-store", str(store), *flags)
    with serving(tmp_path, str(long_model(tmp_path)), *settings, key="one,two") as server:
        http, other = server.http, {"authorization": "Bearer two"}
        body = {"prompt": "Hello there", "max_tokens": 5, "session_id": "chat", "temperature": 0}
        first = http.post("/v1/completions", json=body).json()
        n = http.get("/v1/sessions/chat").json()["num_tokens"]
        assert n == first["usage"]["total_tokens"] - 1
        assert http.post("/v1/sessions/chat/save", json={"file": "f"}).status_code == 200
        assert http.delete("/v1/sessions/chat").json()["deleted"]
        assert http.post("/v1/sessions/again/restore", json={"file": "f"}).json()["num_cached_tokens"] == n
        assert http.get("/v1/sessions/again", headers=other).status_code == 404
        timeline = http.get(f"/v1/requests/{first['id']}/timeline").json()
        assert timeline["choices"][0]["is_over"]
        assert http.get(f"/v1/requests/{first['id']}/timeline", headers=other).status_code == 404
        long = {
            "prompt": "Hello",
            "max_tokens": 30_000,
            "ignore_eos": True,
            "stream": True,
            "request_id": "x",
        }
        raw = b""
        with http.stream("POST", "/v1/completions", json=long) as response:
            for part in response.iter_raw():
                if not raw:
                    assert http.post("/v1/requests/cmpl-x/cancel", headers=other).status_code == 404
                    assert http.post("/v1/requests/cmpl-x/cancel").json()["status"] == "cancelled"
                raw += part
        *_, error, done = events(raw)
        assert (error["error"]["code"], done) == ("cancelled", "[DONE]")
        assert server.stop() == 0
