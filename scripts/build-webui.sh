#!/usr/bin/env bash
# Build the web UI into the package. Without Node.js, print a note and skip it: the API works without the web UI.
set -eu
cd "$(dirname "$0")/.."

# Vite requires 20.19, 22.12 or newer. (`sort -V` orders versions.)
is_recent() {
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
elif ! is_recent "$have" "$least"; then
  why="Node.js is $have, too old"
else
  why=""
fi
if [ -n "$why" ]; then
  printf 'llaisys: %s, so the web UI is not built; the API is served without it.\n' "$why" >&2
  printf '         For the web UI: install the wheel, or Node.js 20.19 or newer (Debian and Ubuntu: apt-get install nodejs npm).\n' >&2
  exit 0
fi

if ! npm --prefix webui ci --silent --no-audit --no-fund; then
  echo "llaisys: npm could not download the packages that build the web UI; check its registry (npm config get registry)." >&2
  exit 1
fi
npm --prefix webui run --silent build >/dev/null
