// The text of a file: text and code in UTF-8 or UTF-16, and PDF. Other files are refused by name.

import { nameOf } from "./attachments";
import type { Attachment } from "./types";
import type { Key } from "./i18n";

const TEXT_BYTES_MAX = 4 * 2 ** 20;
const PDF_BYTES_MAX = 32 * 2 ** 20;
export const PAGES_MAX = 500;

/** A file that cannot go with a message; the key is a text of the page with these variables. */
export class FileError extends Error {
  constructor(
    readonly key: Key,
    readonly vars: Readonly<Record<string, string | number>> = {},
  ) {
    super(key);
  }
}

/** Reads a file of the user. Throws FileError. */
export async function attachmentOf(file: File): Promise<Attachment> {
  const name = nameOf(file.name);
  const max = isPdfName(file) ? PDF_BYTES_MAX : TEXT_BYTES_MAX;
  if (isImage(file)) throw new FileError("file_image");
  if (file.size > max) throw new FileError("file_too_large", { mib: max / 2 ** 20 });
  const bytes = await bytesOf(file);
  const isPdf = startsWith(bytes, "%PDF-");
  const text = isPdf ? await pdfText(bytes) : decoded(bytes);
  if (text.trim() === "") throw new FileError(isPdf ? "file_pdf_no_text" : "file_empty");
  return { name, kind: isPdf ? "pdf" : "text", text };
}

const isPdfName = ({ name, type }: File) => type === "application/pdf" || /\.pdf$/i.test(name);
const isImage = ({ name, type }: File) =>
  (type.startsWith("image/") && type !== "image/svg+xml") || /\.(png|jpe?g|gif|webp|heic|avif)$/i.test(name);

async function bytesOf(file: File): Promise<Uint8Array<ArrayBuffer>> {
  try {
    return new Uint8Array(await file.arrayBuffer());
  } catch {
    throw new FileError("file_unreadable"); // a folder, or a file that is gone
  }
}

function startsWith(bytes: Uint8Array, head: string): boolean {
  return [...head].every((char, i) => bytes[i] === char.charCodeAt(0));
}

async function pdfText(bytes: Uint8Array<ArrayBuffer>): Promise<string> {
  const pdf = await import("./pdf"); // one megabyte and a half: loaded with the first PDF
  return pdf.pdfText(bytes);
}

/** Text in UTF-8, or in UTF-16 with its mark. Throws FileError. */
export function decoded(bytes: Uint8Array): string {
  const isLittle = bytes[0] === 0xff && bytes[1] === 0xfe;
  const isBig = bytes[0] === 0xfe && bytes[1] === 0xff;
  const encoding = isLittle ? "utf-16le" : isBig ? "utf-16be" : "utf-8";
  try {
    const text = new TextDecoder(encoding, { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return text.replaceAll("\r\n", "\n");
  } catch {
    // not in this encoding
  }
  throw new FileError("file_not_text");
}
