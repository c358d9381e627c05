#!/usr/bin/env bash
# Builds the release wheel into dist/ with the tools in $1: abi3, manylinux_2_28 (Zig's linker with the symbols of
# glibc 2.28, whatever this machine has), with the built web UI. Keeps an existing wheel if nothing has changed since.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
old=$(ls dist/llaisys-*-abi3-manylinux_2_28_x86_64.whl 2>/dev/null || true)
if [ -n "$old" ] && [ -z "$(find crates python pyproject.toml Cargo.toml Cargo.lock README.md -newer "$old" -type f \
  -not -name '*.so' -not -name '*.pyc' -print -quit)" ]; then
  echo "$old"
  exit 0
fi
[ -f python/llaisys/webui/index.html ] || { echo "llaisys: the web UI is not built; run make build" >&2; exit 1; }
mkdir -p dist
rm -f dist/*.whl
# maturin finds Zig as the Python package `ziglang` of the first python3 in the path.
PATH=$(cd "$bin" && pwd):$PATH maturin build --release --zig --target x86_64-unknown-linux-gnu \
  --compatibility manylinux_2_28 --out dist >dist/build.log 2>&1 || { cat dist/build.log >&2; exit 1; }
ls dist/llaisys-*-abi3-manylinux_2_28_x86_64.whl
