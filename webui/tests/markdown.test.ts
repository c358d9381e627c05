import { describe, expect, it, vi } from "vitest";
import { Blocks } from "../src/lib/markdown";
import { cut, randomOf } from "./random";

// Sanitising needs a browser; tests/webui proves it in one.
vi.mock("../src/lib/sanitise", () => ({ prose: (html: string) => html }));

const LABELS = { copy: "Copy", image: "image" };
const render = (text: string) =>
  new Blocks()
    .update(text, true, LABELS)
    .map(({ html }) => html)
    .join("");

const SAMPLE = `# Title

A paragraph with **bold**, \`code\` and $x^2$.

- one

  still one
- two
    1. deep

> quote
lazily continued

| a | b |
|---|:-:|
| 1 | 2 |

\`\`\`python
def f():

    return 1
\`\`\`

$$
\\int_0^1 x\\,dx
$$

Setext
------

    indented

the end`;

describe("Markdown", () => {
  it.each([1, 2, 3, 4, 5, 6])("is the same however it arrives (seed %i)", (seed) => {
    const random = randomOf(seed);
    const blocks = new Blocks();
    let text = "";
    for (const piece of cut(SAMPLE, 12, random)) {
      text += piece;
      const shown = blocks.update(text, false, LABELS);
      expect(shown.map(({ html }) => html).join("")).toBe(render(text));
    }
    expect(blocks.update(text, true, LABELS).every(({ settled }) => settled)).toBe(true);
  });

  it("keeps the blocks that are settled, as the same objects", () => {
    const blocks = new Blocks();
    const before = blocks.update("one\n\ntwo\n\nthr", false, LABELS);
    const after = blocks.update("one\n\ntwo\n\nthree", false, LABELS);
    expect(before.map(({ settled }) => settled)).toEqual([true, true, false]);
    expect(after[0]).toBe(before[0]);
    expect(after[1]).toBe(before[1]);
    expect(after[2]).not.toBe(before[2]);
  });

  it("starts again when the text is another one", () => {
    const blocks = new Blocks();
    blocks.update("one\n\ntwo", false, LABELS);
    expect(blocks.update("other", false, LABELS).map(({ html }) => html)).toEqual(["<p>other</p>\n"]);
  });

  it("resolves a link that is defined below, once the text is whole", () => {
    const blocks = new Blocks();
    const text = "[a]\n\nb\n\n[a]: https://example.com/";
    blocks.update(text, false, LABELS);
    expect(blocks.update(text, true, LABELS)[0]!.html).toContain('href="https://example.com/"');
  });

  it.each([
    ["HTML is text", "<b onclick=x>hi</b>", "&lt;b onclick=x&gt;"],
    ["no javascript: links", "[a](javascript:alert(1))", "[a](javascript:alert(1))"],
    ["no file: links", "[a](file:///etc/passwd)", "[a](file:///etc/passwd)"],
    [
      "images of hosts are links",
      "![pic](https://example.com/a.png)",
      '<a class="image" href="https://example.com/a.png"',
    ],
    ["links leave nothing behind", "https://example.com", 'rel="noopener noreferrer nofollow"'],
    ["bare names are no links", "see main.rs and a.com", "<p>see main.rs and a.com</p>"],
    ["headings begin at the third level", "# a", "<h3>a</h3>"],
    ["alignment without style", "|a|\n|:-:|\n|b|", '<th class="center">'],
    ["prices are no formulas", "from $5 to $6 each", "from $5 to $6 each"],
    ["formulas", "so \\(a\\) is", '<span class="maths">a</span>'],
    ["displayed formulas", "\\[\nx < y\n\\]", '<span class="maths display">x &lt; y</span>'],
    ["stars inside formulas", "$a*b*c$", '<span class="maths">a*b*c</span>'],
    ["a language is a plain word", '```"><x\ncode\n```', 'class="language-"'],
  ])("%s", (_, text, expected) => {
    expect(render(text)).toContain(expected);
  });
});
