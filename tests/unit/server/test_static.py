"""Static files of the web UI: served files, headers, and the response if it is not built."""

from __future__ import annotations

import gzip
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from llaisys.server.webui.static import CONTENT_SECURITY_POLICY, load_webui, router

SCRIPT = "console.log('a script of the page');\n" * 20


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """Return a web UI folder like that of a build."""
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text('<script type="module" src="./assets/app-1.js"></script>', "utf-8")
    (tmp_path / "assets" / "app-1.js").write_text(SCRIPT, "utf-8")
    (tmp_path / "assets" / "app-1.js.gz").write_bytes(gzip.compress(SCRIPT.encode()))
    (tmp_path / "assets" / "icon-2.svg").write_text("<svg/>", "utf-8")
    (tmp_path / "assets" / "Font-3.woff2").write_bytes(b"wOF2" + bytes(2000))
    return tmp_path


@pytest.fixture
async def of_built(built: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Return a client of a server that has only this web UI."""
    app = FastAPI()
    app.include_router(router)
    app.state.webui = load_webui(built)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://page") as made:
        yield made


async def test_the_index_page_and_its_headers(client: httpx.AsyncClient) -> None:
    for method in ("GET", "HEAD"):
        response = await client.request(method, "/")
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert response.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-cache"


def test_the_content_security_policy_allows_own_files_only() -> None:
    """Only files of the server may run or load, and only two trusted-types policies may create HTML."""
    assert CONTENT_SECURITY_POLICY == (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; "
        "trusted-types svelte-trusted-html dompurify"
    )


async def test_every_built_file_is_served(of_built: httpx.AsyncClient) -> None:
    names = re.findall(r'"\./(assets/[^"]+)"', (await of_built.get("/")).text)
    assert names == ["assets/app-1.js"]
    script = await of_built.get(names[0])
    assert script.text == SCRIPT
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["cache-control"] == "public, max-age=31536000, immutable"
    icon = await of_built.get("/assets/icon-2.svg")
    assert icon.headers["content-type"].startswith("image/svg+xml")
    font = await of_built.get("/assets/Font-3.woff2")
    assert font.headers["content-type"] == "font/woff2"
    assert "content-encoding" not in font.headers  # the format is compressed


async def test_files_are_compressed_if_the_client_accepts_it(of_built: httpx.AsyncClient) -> None:
    async with of_built.stream(
        "GET", "/assets/app-1.js", headers={"accept-encoding": "br, gzip"}
    ) as response:
        raw = b"".join([part async for part in response.aiter_raw()])
    assert response.headers["content-encoding"] == "gzip"
    assert response.headers["vary"] == "accept-encoding"
    assert gzip.decompress(raw) == SCRIPT.encode()
    plain = await of_built.get("/assets/app-1.js", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == SCRIPT.encode()
    not_compressed = await of_built.get("/assets/icon-2.svg")
    assert "content-encoding" not in not_compressed.headers
    assert (await of_built.get("/assets/app-1.js.gz")).status_code == 404  # a form of the file, not a file


@pytest.mark.parametrize(
    "path", ["/assets/..%2findex.html", "/assets/%2e%2e/index.html", "/index.html", "/assets/"]
)
async def test_other_files_are_not_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


def test_without_a_build_the_index_page_has_instructions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        page = load_webui(tmp_path / "nowhere")
    assert set(page) == {"/"}
    text = page["/"].content.decode()
    for part in ("wheel", "Node.js", "/v1"):
        assert part in text
    assert "not built" in caplog.text
    assert not re.search(r"<script|<style|\sstyle=|https?://", text)
