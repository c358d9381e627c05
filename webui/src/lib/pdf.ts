// The text of a PDF, by pdf.js in a worker of its own: whatever a file does there, the page stops it.

import { getDocument, PasswordException, PDFWorker, type PDFDocumentLoadingTask } from "pdfjs-dist";
import { CHARS_MAX } from "./attachments";
import { FileError, PAGES_MAX } from "./filetext";
import { startPdfWorker } from "./trusted";

const LIMIT_MS = 60_000;

/** The text of all pages. Throws FileError. */
export async function pdfText(bytes: Uint8Array<ArrayBuffer>): Promise<string> {
  const worker = startPdfWorker();
  let timer: ReturnType<typeof setTimeout> | undefined;
  const stopped = new Promise<never>((_, stop) => {
    timer = setTimeout(() => stop(new FileError("file_pdf_slow", { s: LIMIT_MS / 1000 })), LIMIT_MS);
    worker.onerror = () => stop(new FileError("file_pdf_damaged"));
  });
  const task = getDocument({
    data: bytes,
    worker: PDFWorker.create({ port: worker, verbosity: 0 }),
    disableFontFace: true,
    useSystemFonts: false,
    useWasm: false,
    verbosity: 0,
  });
  try {
    return await Promise.race([read(task), stopped]);
  } catch (error) {
    if (error instanceof FileError) throw error;
    const isLocked = error instanceof PasswordException;
    throw new FileError(isLocked ? "file_pdf_locked" : "file_pdf_damaged");
  } finally {
    clearTimeout(timer);
    worker.terminate();
    void task.destroy().catch(() => undefined);
  }
}

async function read(task: PDFDocumentLoadingTask): Promise<string> {
  const document = await task.promise;
  const { numPages } = document;
  if (numPages > PAGES_MAX) throw new FileError("file_pdf_pages", { n: numPages, max: PAGES_MAX });
  const pages: string[] = [];
  let chars = 0;
  for (let number = 1; number <= numPages && chars <= CHARS_MAX; number++) {
    const page = await document.getPage(number);
    const { items } = await page.getTextContent();
    const text = items.map((item) => ("str" in item ? item.str + (item.hasEOL ? "\n" : "") : "")).join("");
    page.cleanup();
    pages.push(text.trim());
    chars += text.length;
  }
  return pages.filter(Boolean).join("\n\n");
}
