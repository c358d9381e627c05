import { svelte } from "@sveltejs/vite-plugin-svelte";
import { defineConfig } from "vitest/config";

// The build goes into the package, so that the wheel holds it. Every asset lies in `assets/` under a name with its
// content's hash: browsers may keep it for ever. Their URLs are relative, because a proxy may serve the page below a path.
// Nothing is inlined as `data:`, which the policy would refuse.
export default defineConfig({
  plugins: [svelte()],
  base: "./",
  build: {
    outDir: "../python/llaisys/webui",
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
  },
  test: { include: ["tests/**/*.test.ts"] },
});
