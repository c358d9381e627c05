// Copies src/ to the package (python/llaisys/webui), each asset under a name that holds its content's hash, so that
// browsers may keep it for ever. References between files are plain names: `/assets/app.js`, `./api.js`.
// No dependency; `npm run build`.

import { createHash } from "node:crypto";
import { mkdirSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { dirname, extname, join } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const source = join(here, "src");
const target = join(here, "..", "python", "llaisys", "webui");

const texts = new Map(readdirSync(join(source, "assets")).map((name) => [name, read("assets", name)]));
const built = new Map();

function read(...path) {
  return readFileSync(join(source, ...path), "utf8");
}

/** The text with every asset that it names renamed; what it names is built first. */
function renamed(text) {
  return text.replace(/(["'])(\/assets\/|\.\/)([\w.-]+)\1/g, (whole, quote, folder, name) =>
    texts.has(name) ? `${quote}${folder}${build(name)}${quote}` : whole,
  );
}

/** Hashed name of one asset. */
function build(name) {
  if (!built.has(name)) {
    const text = renamed(texts.get(name));
    const hash = createHash("sha256").update(text).digest("hex").slice(0, 12);
    built.set(name, { hashed: name.replace(/\.\w+$/, `-${hash}${extname(name)}`), text });
  }
  return built.get(name).hashed;
}

const page = renamed(read("index.html"));
for (const name of texts.keys()) build(name);
rmSync(target, { recursive: true, force: true });
mkdirSync(join(target, "assets"), { recursive: true });
writeFileSync(join(target, "index.html"), page);
for (const { hashed, text } of built.values()) writeFileSync(join(target, "assets", hashed), text);
