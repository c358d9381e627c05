"""A growing completion: what is finished keeps its nodes, selection and focus."""

from __future__ import annotations

from playwright.sync_api import Locator, expect

from chatpage import COUNT, REMEMBER, Chat

RICH = (
    "Some **bold** text and \\(x^2\\).\n\n```python\ndef f(x):\n    return x < 1\n```\n\n"
    "| a | b |\n|---|---|\n| 1 | \\(y_1\\) |\n\n- one\n- two\n\n$$\n\\frac{1}{2}\n$$\n\n"
)


def typeset(text: Locator, n_formulas: int) -> None:
    """Wait until the code and formulas of a text have their final nodes."""
    expect(text.locator("math")).to_have_count(n_formulas)
    expect(text.locator(".hljs-keyword").first).to_be_visible()


def test_finished_blocks_keep_their_nodes(fed: Chat) -> None:
    """An earlier completion, and the finished blocks of the growing one."""
    fed.send("q")
    fed.feed(RICH)
    fed.end()
    typeset(fed.text, 3)
    n = fed.text.evaluate_all(REMEMBER)
    assert n > 50
    earlier = fed.text.element_handle()
    assert earlier is not None
    fed.send("q")
    expect(fed.completions).to_have_count(2)
    fed.feed(RICH, "last ")
    typeset(fed.text, 3)
    fed.page.evaluate("window.ofEarlier = window.lost")
    fed.text.locator(".block:not(:last-child)").evaluate_all(REMEMBER)
    for i in range(20):
        fed.feed(f"word{i} ")
    fed.feed("\n\n", RICH)
    assert fed.page.evaluate("[ofEarlier(), lost()]") == [0, 0]
    fed.end()
    assert fed.page.evaluate("[ofEarlier(), lost()]") == [0, 0]
    assert earlier.is_visible()


def test_selection_focus_and_copied_survive_a_stream(fed: Chat) -> None:
    fed.send("q")
    fed.feed(RICH)
    fed.end()
    typeset(fed.text, 3)
    fed.text.get_by_role("button", name="Copy").click()
    fed.send("q")
    fed.feed("Say **this** and ")
    first = fed.completions.first
    first.locator("pre").focus()
    select = "(element) => getSelection().selectAllChildren(element)"
    fed.text.locator("strong").evaluate(select)
    fed.feed(*(f"word{i} " for i in range(10)), "\n\n", *RICH)
    assert fed.page.evaluate("getSelection().toString()") == "this"
    expect(first.locator("pre")).to_be_focused()
    expect(first.get_by_role("button", name="Copied")).to_be_visible()
    fed.end()
    assert fed.page.evaluate("getSelection().toString()") == "this"


def test_code_has_its_colors_while_it_grows(fed: Chat) -> None:
    """A line of a long block costs no more than one of a short block. The colors are those of the whole."""
    lines = [f"    total += a * cos({i})  # add {i}\n" for i in range(200)]
    fed.send("q")
    fed.feed('```python\ndef f():\n    """Doc\n')
    expect(fed.text.locator("code")).to_be_visible()
    fed.feed('    more"""\n')
    expect(fed.text.locator(".hljs-keyword")).to_have_text("def")
    expect(fed.text.locator(".hljs-string")).to_have_text('"""Doc\n    more"""', use_inner_text=False)
    fed.text.locator("pre").focus()
    fed.page.evaluate(COUNT)
    fed.feed(lines[0])
    expect(fed.text.locator(".hljs-comment")).to_have_text("# add 0")
    first = fed.page.evaluate("touched()")
    fed.feed("".join(lines[1:-10]))
    expect(fed.text.locator(".hljs-comment").last).to_contain_text("# add 189")
    fed.page.evaluate("touched()")
    for i in range(190, 200):
        fed.feed(lines[i])
        expect(fed.text.locator(".hljs-comment").last).to_have_text(f"# add {i}")
        assert fed.page.evaluate("touched()") <= 2 * first
    fed.text.locator(".hljs-keyword").first.evaluate_all(REMEMBER)
    fed.feed("```\n\nafter")
    expect(fed.text.locator(".hljs-comment")).to_have_count(200)
    expect(fed.text.locator("pre")).to_be_focused()
    fed.end()
    assert fed.page.evaluate("lost()") == 0
    colored = fed.text.locator("pre").inner_html()
    fed.reload()
    expect(fed.text.locator(".hljs-comment")).to_have_count(200)
    assert fed.text.locator("pre").inner_html() == colored
    assert fed.complaints == []


def test_a_growing_table_only_gets_rows(fed: Chat) -> None:
    fed.send("q")
    fed.feed("| a | b |\n|---|---|\n| 0 | **x** |\n")
    expect(fed.text.locator("tr")).to_have_count(2)
    fed.page.evaluate(COUNT)
    fed.feed("| 1 | **x** |\n")
    expect(fed.text.locator("strong")).to_have_count(2)
    first = fed.page.evaluate("touched()")
    fed.feed("".join(f"| {i} | **x** |\n" for i in range(2, 120)))
    expect(fed.text.locator("strong")).to_have_count(120)
    fed.text.locator("tr").evaluate_all(REMEMBER)
    fed.page.evaluate("touched()")
    for i in range(120, 130):
        fed.feed(f"| {i} ", "| **x** |\n")
        expect(fed.text.locator("strong")).to_have_count(i + 1)
        assert fed.page.evaluate("touched()") <= 2 * first
    expect(fed.text.locator("tr")).to_have_count(131)
    assert fed.page.evaluate("lost()") == 0
    fed.feed("\nafter")
    fed.end()
    assert fed.page.evaluate("lost()") == 0


def test_a_list_becomes_another_block(fed: Chat) -> None:
    """What the last block is may change with each piece."""
    fed.send("q")
    fed.feed("- a\n- b\n", "  - c\n", "\n  loose\n")
    expect(fed.text.locator("li")).to_have_text(["a", "b c loose", "c"])
    fed.feed("- - -\n")
    expect(fed.text.locator("hr")).to_have_count(1)
    fed.feed("| h |\n", "|---|\n", "`", "``\ncode\n")
    expect(fed.text.locator("tr")).to_have_count(1)
    expect(fed.text.locator("pre")).to_have_text("code")
    fed.feed("```\n> - quoted\n")
    expect(fed.text.locator("blockquote li")).to_have_text(["quoted"])
    fed.end()
    assert fed.complaints == []
