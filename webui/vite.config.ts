import { readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";
import { svelte } from "@sveltejs/vite-plugin-svelte";
import type { Plugin } from "vite";
import { defineConfig } from "vitest/config";

/** Every browser that runs the page reads WOFF2: KaTeX's two older formats of each font stay out of the package. */
const woff2Only: Plugin = {
  name: "woff2-only",
  enforce: "pre",
  transform(code, id) {
    if (!/katex[^/]*\.css$/.test(id)) return null;
    return code.replaceAll(/,\s*url\([^)]*\.(?:woff|ttf)\)\s*format\("[a-z]+"\)/g, "");
  },
};

/** The server sends a file's compressed form, which lies next to it, to browsers that accept it. */
const compressed: Plugin = {
  name: "compressed",
  writeBundle({ dir = "" }, files) {
    for (const name of Object.keys(files).filter((name) => /\.(html|js|css)$/.test(name))) {
      writeFileSync(join(dir, `${name}.gz`), gzipSync(readFileSync(join(dir, name)), { level: 9 }));
    }
  },
};

// The build goes into the package, so that the wheel holds it. Every asset lies in `assets/` under a name with its
// content's hash: browsers may keep it for ever. Their URLs are relative, because a proxy may serve the page below a path.
// Nothing is inlined as `data:`, which the policy would refuse. `licenses.md` has the licenses of the libraries and fonts in it.
export default defineConfig({
  plugins: [woff2Only, svelte(), compressed],
  base: "./",
  worker: { format: "es" },
  build: {
    outDir: "../python/llaisys/webui",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    license: { fileName: "licenses.md" },
  },
  test: { include: ["tests/**/*.test.ts"] },
});
