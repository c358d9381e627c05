"""The page: which files are served, with which headers, and what its sources keep to."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from llaisys.server.page import CONTENT_SECURITY_POLICY, load_page

SOURCES = Path(__file__).parents[3] / "webui" / "src"


async def test_the_page_and_its_headers(client: httpx.AsyncClient) -> None:
    for method in ("GET", "HEAD"):
        answer = await client.request(method, "/")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert answer.headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-cache"


async def test_everything_that_the_page_names_is_served(client: httpx.AsyncClient) -> None:
    names = set(re.findall(r'"(/assets/[^"]+)"', (await client.get("/")).text))
    assert names
    while names:
        name = names.pop()
        answer = await client.get(name)
        assert answer.status_code == 200, name
        assert answer.headers["content-type"].startswith(
            "text/javascript" if name.endswith("js") else "text/css"
        )
        names |= {f"/assets/{other}" for other in re.findall(r'from "\./([^"]+)"', answer.text)}


@pytest.mark.parametrize(
    "path", ["/assets/..%2findex.html", "/assets/%2e%2e/index.html", "/index.html", "/assets/"]
)
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


def test_a_build_goes_before_the_sources(tmp_path: Path) -> None:
    built, sources = tmp_path / "built", tmp_path / "src"
    for place in (built, sources):
        (place / "assets").mkdir(parents=True)
        (place / "assets" / "app.js").write_text(place.name)
    (sources / "index.html").write_text("<p>")
    page = load_page((built, sources))
    assert set(page) == {"/", "/assets/app.js"}
    assert page["/assets/app.js"].content == b"src"
    (built / "index.html").write_text("<p>")
    assert load_page((built, sources))["/assets/app.js"].content == b"built"
    assert load_page((tmp_path / "nowhere",)) == {}


def test_the_sources_put_in_text_and_nothing_else() -> None:
    html = (SOURCES / "index.html").read_text("utf-8")
    assert not re.search(r"<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=|https?://", html)
    for path in (SOURCES / "assets").glob("*.js"):
        code = path.read_text("utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|localStorage", code
        ), path
