// The one place where text becomes HTML that the browser may take: DOMPurify, which also makes it a TrustedHTML.

import DOMPurify, { type Config } from "dompurify";

const PROSE: Config = {
  ALLOWED_TAGS: [
    ..."p br hr h3 h4 h5 h6 ul ol li blockquote pre code em strong s a img span div button".split(" "),
    ..."table thead tbody tr th td".split(" "),
  ],
  ALLOWED_ATTR: ["href", "title", "target", "rel", "class", "start", "src", "alt", "type", "tabindex"],
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
const MATHS: Config = {
  USE_PROFILES: { mathMl: true },
  ADD_FORBID_CONTENTS: ["annotation"],
  FORBID_ATTR: ["style", "class", "href"],
};

const clean = (html: string, config: Config) =>
  DOMPurify.sanitize(html, { ...config, RETURN_TRUSTED_TYPE: true }) as unknown as string;

/** HTML of our Markdown renderer. The value is a TrustedHTML where the browser has them. */
export const prose = (html: string) => clean(html, PROSE);
/** HTML of the highlighter: spans with classes. */
export const code = (html: string) => clean(html, CODE);
/** MathML of KaTeX, without the TeX source that it repeats. */
export const maths = (html: string) => clean(html, MATHS);
