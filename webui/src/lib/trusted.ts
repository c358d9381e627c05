// The page's Trusted Types policy. The content security policy allows one name for it, "dompurify": the sanitizer uses it
// for HTML, and the worker that reads PDF for its address.

import pdfWorkerUrl from "pdfjs-dist/build/pdf.worker.min.mjs?worker&url";

/** Null in a browser without Trusted Types, which takes plain text. */
export const policy = (window.trustedTypes?.createPolicy("dompurify", {
  createHTML: (html) => html, // called by the sanitizer only
  createScriptURL: (url) => {
    if (url !== pdfWorkerUrl) throw new TypeError(`not a script of this page: ${url}`);
    return url;
  },
}) ?? null) as TrustedTypePolicy | null;

/** Starts the worker that reads PDF. */
export function startPdfWorker(): Worker {
  const url = policy?.createScriptURL(pdfWorkerUrl) ?? pdfWorkerUrl;
  return new Worker(url as string, { type: "module" });
}
