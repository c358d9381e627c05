#!/usr/bin/env bash
# Builds the page into the package. Without Node.js it says so and leaves it at that: the API needs no page.
set -eu
cd "$(dirname "$0")/.."

# What Vite asks for: 20.19, 22.12 or anything newer. (`sort -V` puts versions in order.)
fit() {
  case "$1" in
  20.* | 22.*) [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ] ;;
  *) [ "$(printf '%s\n23\n' "$1" | sort -V | head -n 1)" = 23 ] ;;
  esac
}

have=$(node --version 2>/dev/null || true)
have=${have#v}
case "$have" in 20.*) least=20.19 ;; *) least=22.12 ;; esac
if [ -z "$have" ]; then
  why="Node.js is not installed"
elif ! command -v npm >/dev/null 2>&1; then
  why="npm is not installed"
elif ! fit "$have" "$least"; then
  why="Node.js is $have, too old"
else
  why=""
fi
if [ -n "$why" ]; then
  printf 'llaisys: %s, so the chat page is not built; the API is served without it.\n' "$why" >&2
  printf '         For the page: install the wheel, or Node.js 20.19 or newer (Debian and Ubuntu: apt-get install nodejs npm).\n' >&2
  exit 0
fi

if ! npm --prefix webui ci --silent --no-audit --no-fund; then
  echo "llaisys: npm could not fetch what builds the page; it needs a registry (npm config get registry)." >&2
  exit 1
fi
npm --prefix webui run --silent build >/dev/null
