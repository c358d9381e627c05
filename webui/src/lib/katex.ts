// KaTeX with its fonts and styles; loaded when the first formula needs it.

import katex from "katex";
import "katex/dist/katex.min.css";
import { formula } from "./sanitize";

// The style properties that KaTeX sets: sizes, places and colors.
const STYLES =
  /^(?:height|(?:min-)?width|top|bottom|left|vertical-align|(?:margin|padding|border)(?:-[a-z]+)*|(?:background-)?color|text-shadow)$/;

/**
 * A formula for the eye, with its MathML for screen readers. The policy refuses `style` in markup, so each style is set
 * on its element. Null if this is not TeX.
 */
export function typeset(tex: string, displayMode: boolean): DocumentFragment | null {
  const markup = markupOf(tex, displayMode);
  if (markup === null) return null;
  // In text and attributes KaTeX escapes quotation marks: this matches attributes only.
  const made = formula(markup.replaceAll(' style="', ' data-style="'));
  for (const element of made.querySelectorAll<HTMLElement | SVGElement | MathMLElement>("[data-style]")) {
    const declarations = element.getAttribute("data-style")!.split(";");
    element.removeAttribute("data-style");
    for (const declaration of declarations) {
      const [name = "", value = ""] = declaration.split(":");
      if (STYLES.test(name) || declaration === "position:relative") element.style.setProperty(name, value);
    }
  }
  return made;
}

function markupOf(tex: string, displayMode: boolean): string | null {
  try {
    return katex.renderToString(tex, {
      displayMode,
      throwOnError: true,
      strict: "ignore",
      trust: false,
      maxExpand: 200,
      maxSize: 20,
    });
  } catch {
    return null;
  }
}
