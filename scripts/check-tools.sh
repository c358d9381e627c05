#!/usr/bin/env bash
# Print how to install each tool that a build needs and this machine lacks. Exit 1 if any is missing.
# Node.js is optional: scripts/build-webui.sh skips the web UI without it.
set -u
missing=0

need() { # command, what it is for, how to get it
  command -v "$1" >/dev/null 2>&1 && return
  printf 'llaisys: %s is not installed (%s).\n         %s\n' "$1" "$2" "$3" >&2
  missing=1
}

need cargo "builds the core" "Install Rust 1.95 or newer: https://rustup.rs, then open a new shell."
need cc "links the core" "Debian and Ubuntu: apt-get install build-essential"
need python3 "runs the engine" "Install Python 3.10 or newer. Debian and Ubuntu: apt-get install python3 python3-venv"

if command -v cargo >/dev/null 2>&1; then
  have=$(rustc --version 2>/dev/null | awk '{print $2}')
  if [ "$(printf '%s\n1.95.0\n' "$have" | sort -V | head -n 1)" != 1.95.0 ]; then
    printf 'llaisys: rustc is %s, 1.95 or newer is needed.\n         Run: rustup update stable\n' "${have:-not usable}" >&2
    missing=1
  fi
fi
if command -v python3 >/dev/null 2>&1; then
  if ! python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
    printf 'llaisys: %s is too old, Python 3.10 or newer is needed.\n' "$(python3 --version)" >&2
    missing=1
  elif ! python3 -c 'import venv, ensurepip' 2>/dev/null; then
    printf 'llaisys: this Python cannot make virtual environments.\n         Debian and Ubuntu: apt-get install python3-venv\n' >&2
    missing=1
  fi
fi
exit "$missing"
