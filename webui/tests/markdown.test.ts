import { describe, expect, it } from "vitest";
import { Blocks, type Block } from "../src/lib/markdown";
import { cut, randomOf } from "./random";

const LABELS = { copy: "Copy", image: "image" };
// Items go into the first list of their shell.
const markup = ({ shell, items }: Block) => shell.replace(/(?=<\/(?:ul|ol|tbody)>)/, items.join(""));
const joined = (blocks: readonly Block[]) => blocks.map(markup).join("");
const render = (text: string) => joined(new Blocks().update(text, true, LABELS));

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
      expect(joined(shown)).toBe(render(text));
    }
  });

  it.each(["\r\n", "\r"])("is the same with lines that end in %j", (end) => {
    const blocks = new Blocks();
    let text = "";
    for (const c of SAMPLE.slice(0, 150).replaceAll("\n", end)) blocks.update((text += c), false, LABELS);
    expect(joined(blocks.update(text, false, LABELS))).toBe(render(SAMPLE.slice(0, 150)));
  });

  it("divides a long paragraph, however it arrives", () => {
    const words = Array.from({ length: 6000 }, (_, i) => `word${i}`);
    const text = `# Title\n\n${words.join(" ")}\n\nthe end`;
    const whole = new Blocks().update(text, true, LABELS);
    expect(whole.length).toBeGreaterThan(6);
    for (const { shell } of whole) expect(shell.length).toBeLessThan(8100);
    expect(joined(whole).match(/word\d+/g)).toEqual(words);
    const blocks = new Blocks();
    for (let at = 0; at <= text.length; at += 997) blocks.update(text.slice(0, at), false, LABELS);
    expect(blocks.update(text, true, LABELS)).toEqual(whole);
    // A paragraph without a space, too.
    expect(new Blocks().update("x".repeat(20_000), true, LABELS).map(({ shell }) => shell.length)).toEqual([
      8008, 8008, 4008,
    ]);
  });

  it("parses the last block only, and nothing if nothing has changed", () => {
    const blocks = new Blocks();
    const before = blocks.update("one\n\ntwo\n\nthr", false, LABELS);
    expect(blocks.update("one\n\ntwo\n\nthr", false, LABELS)).toBe(before);
    const after = blocks.update("one\n\ntwo\n\nthree", false, LABELS);
    expect(joined(after)).toBe("<p>one</p>\n<p>two</p>\n<p>three</p>\n");
    expect(after[0]).toBe(before[0]);
    expect(after[1]).toBe(before[1]);
  });

  it("goes on after the text was whole", () => {
    const blocks = new Blocks();
    blocks.update("[a]\n\ntwo\n\n[a]: https://example.com/", true, LABELS);
    const text = "[a]\n\ntwo\n\n[a]: https://example.com/b\n\nthree";
    expect(joined(blocks.update(text, true, LABELS))).toBe(render(text));
  });

  it("starts again when the text is another one", () => {
    const blocks = new Blocks();
    blocks.update("one\n\ntwo", false, LABELS);
    expect(blocks.update("other", false, LABELS)).toEqual([{ shell: "<p>other</p>\n", items: [] }]);
  });

  it("has the items of a list and the rows of a table apart", () => {
    const [list, table] = new Blocks().update("1. a\n2. b\n\n|h|\n|-|\n|x|\n|y|", true, LABELS);
    expect(list).toEqual({ shell: "<ol></ol>\n", items: ["<li>a</li>", "<li>b</li>"] });
    expect(table!.items.map((row) => row.replace(/\s/g, ""))).toEqual([
      "<tr><td>x</td></tr>",
      "<tr><td>y</td></tr>",
    ]);
    expect(table!.shell).toContain("</thead><tbody></tbody></table>");
  });

  it("resolves a link that is defined below, once the text is whole", () => {
    const blocks = new Blocks();
    const text = "[a]\n\nb\n\n[a]: https://example.com/";
    blocks.update(text, false, LABELS);
    expect(blocks.update(text, true, LABELS)[0]!.shell).toContain('href="https://example.com/"');
  });

  it("nests a heading under one that arrived before", () => {
    const blocks = new Blocks();
    blocks.update("### a\n\ntext\n\n", false, LABELS);
    for (const isWhole of [false, true]) {
      const shown = blocks.update("### a\n\ntext\n\n#### b\n\nmore", isWhole, LABELS);
      expect(JSON.stringify(shown)).toContain("<h4>b</h4>");
    }
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
    ["headings skip no level", "### a\n\n#### b\n\n## c", "<h3>a</h3>\n<h4>b</h4>\n<h3>c</h3>"],
    ["alignment without style", "|a|\n|:-:|\n|b|", '<th class="center">'],
    ["prices are no formulas", "from $5 to $6 each", "from $5 to $6 each"],
    ["formulas", "so \\(a\\) is", '<span class="maths">a</span>'],
    ["displayed formulas", "\\[\nx < y\n\\]", '<span class="maths display" tabindex="0">x &lt; y</span>'],
    ["stars inside formulas", "$a*b*c$", '<span class="maths">a*b*c</span>'],
    ["a task", "- [ ] a **b**", '<li class="task"><label><input type="checkbox" disabled>a <strong>'],
    ["a done task", "1. [x] a", '<input type="checkbox" disabled checked>a</label></li>'],
    ["a task of a loose list", "- [X] a\n\n- b", '<p><label><input type="checkbox" disabled checked>a'],
    ["no task without a text", "- [ ]", "<li>[ ]</li>"],
    ["no task outside a list", "[x] a", "<p>[x] a</p>"],
    ["line breaks", "a<br>b<BR />c", "<p>a<br>\nb<br>\nc</p>"],
    ["line breaks in code are text", "`<br>`", "<code>&lt;br&gt;</code>"],
    ["line breaks with attributes are text", "<br onclick=x>", "&lt;br onclick=x&gt;"],
    ["a language is a plain word", '```"><x\ncode\n```', 'class="language-"'],
  ])("%s", (_, text, expected) => {
    expect(render(text)).toContain(expected);
  });
});
