"""The cost of the web UI: bytes of the first load, and nodes that a piece of a stream changes."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

from playwright.sync_api import BrowserContext, expect

import llaisys
from chatpage import COUNT, Chat
from serving import Server

# Compressed; fonts are loaded with the first formula.
FIRST_LOAD_BYTES_MAX = 160_000


def test_the_first_load_is_small(tiny: Server, context: BrowserContext) -> None:
    """Sum the compressed sizes of the files that the browser requests until the web UI is ready."""
    loaded: list[str] = []
    context.on("request", lambda request: loaded.append(request.url))
    Chat.open(context, tiny.url)
    files = [url for url in loaded if "/v1/" not in url]
    assert all(url.startswith(tiny.url) for url in files)
    assert any(url.endswith(".js") for url in files)
    total = sum(len(gzip.compress(tiny.http.get(url).content)) for url in files)
    assert total <= FIRST_LOAD_BYTES_MAX, f"{total} bytes: {files}"


def test_it_works_below_the_path_of_a_proxy(tiny: Server, context: BrowserContext) -> None:
    """Every request stays below the path, also those of a chat."""
    loaded: list[str] = []
    context.on("request", lambda request: loaded.append(request.url))
    chat = Chat.open(context, f"{tiny.url}/llm/")
    chat.with_fields(max_tokens=4, ignore_eos=True)
    chat.send("Hi")
    chat.done()
    assert any(url.endswith("/v1/chat/completions") for url in loaded)
    assert [url for url in loaded if not url.startswith(f"{tiny.url}/llm/")] == []


def test_the_server_sends_it_compressed(tiny: Server) -> None:
    page = tiny.http.get("/")
    names = re.findall(r'"\.(/assets/[^"]+\.js)"', page.text)
    assert names
    for name in names:
        with tiny.http.stream("GET", name, headers={"accept-encoding": "gzip"}) as response:
            raw = b"".join(response.iter_raw())
        assert response.headers["content-encoding"] == "gzip"
        plain = tiny.http.get(name, headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert gzip.decompress(raw) == plain.content
        assert len(raw) < len(plain.content)


def test_a_piece_of_a_stream_changes_only_the_last_block(fed: Chat) -> None:
    """After 300 paragraphs, code and tables, a word costs no more than in the first one."""
    fed.send("q")
    fed.feed("begin ")
    expect(fed.text).to_have_text("begin")
    fed.page.evaluate(COUNT)
    fed.feed("first ")
    expect(fed.text).to_have_text("begin first")
    first = fed.page.evaluate("touched()")
    assert first > 0
    long = "".join(f"paragraph {i} with **bold** text\n\n| a |\n|---|\n| {i} |\n\n" for i in range(150))
    fed.feed("\n\n" + long, "```python\nx = 1\n```\n\nlast ")
    expect(fed.text.locator(".block")).to_have_count(303)
    expect(fed.text.locator(".hljs-number")).to_have_count(1)  # the highlighter is loaded, too
    fed.page.evaluate("touched()")
    for i in range(5):
        fed.feed(f"word{i} ")
        expect(fed.text).to_contain_text(f"word{i}")
        assert fed.page.evaluate("touched()") <= first
    fed.end()


def test_pieces_within_one_frame_are_rendered_once(fed: Chat) -> None:
    """200 pieces at once are rendered in a few frames, not 200 times."""
    fed.send("q")
    fed.feed("begin ")
    expect(fed.text).to_have_text("begin")
    fed.page.evaluate(COUNT)
    fed.feed("word ")
    expect(fed.text).to_have_text("begin word")
    one = fed.page.evaluate("touched()")
    fed.page.evaluate("for (let i = 0; i < 200; i++) feed.text(`w${i} `)")
    expect(fed.text).to_contain_text("w199")
    assert fed.page.evaluate("touched()") <= 10 * one
    fed.end()


def test_the_package_contains_the_web_ui() -> None:
    """The wheel takes the built web UI from the package."""
    built = Path(llaisys.__file__).parent / "webui"
    assert (built / "index.html").is_file()
    assert list(built.glob("assets/*.js"))
    assert len(list(built.glob("assets/KaTeX_*.woff2"))) == 20
    licenses = (built / "licenses.md").read_text("utf-8")
    assert "## katex" in licenses
