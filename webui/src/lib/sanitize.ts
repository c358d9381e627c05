// The one place where text becomes HTML: DOMPurify, whose nodes are free of scripts, handlers and foreign addresses.

import DOMPurify, { type Config } from "dompurify";
import { policy } from "./trusted";

const PROSE: Config = {
  ALLOWED_TAGS: [
    ..."p br hr h3 h4 h5 h6 ul ol li blockquote pre code em strong s a img span div button label input".split(
      " ",
    ),
    ..."table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: [
    "href",
    "title",
    "target",
    "rel",
    "class",
    "start",
    "src",
    "alt",
    "type",
    "tabindex",
    "checked",
    "disabled",
  ],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|data:image\/(?:png|gif|jpeg|webp);base64,)/i,
  // The pattern above is for addresses; these hold none.
  ADD_URI_SAFE_ATTR: ["target", "rel", "start", "type", "tabindex"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};
const CODE: Config = {
  ALLOWED_TAGS: ["span"],
  ALLOWED_ATTR: ["class"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};
const FORMULA: Config = {
  USE_PROFILES: { mathMl: true },
  ADD_TAGS: ["span", "svg", "path", "line"],
  ADD_ATTR: [
    ..."class data-style aria-hidden columnalign columnspacing".split(" "),
    ..."viewBox preserveAspectRatio d x1 y1 x2 y2 stroke-width".split(" "),
  ],
  ADD_URI_SAFE_ATTR: ["data-style"],
  ADD_FORBID_CONTENTS: ["annotation"],
  FORBID_TAGS: ["annotation"],
  FORBID_ATTR: ["style", "href", "id"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
};

// Of form fields, the box of a task list only.
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.localName === "input" && !node.matches("[type=checkbox][disabled]")) node.remove();
});

const clean = (html: string, config: Config): DocumentFragment =>
  DOMPurify.sanitize(html, {
    ...config,
    RETURN_DOM_FRAGMENT: true,
    ...(policy ? { TRUSTED_TYPES_POLICY: policy } : {}),
  });

/** HTML of our Markdown renderer. */
export const prose = (html: string) => clean(html, PROSE);
/** HTML of the highlighter: spans with classes. */
export const code = (html: string) => clean(html, CODE);
/** HTML and MathML of KaTeX, without the TeX source that it repeats, and with each style in `data-style`. */
export const formula = (html: string) => clean(html, FORMULA);
