#!/usr/bin/env bash
# The web UI is tested in a real Chromium: an installed one, else Playwright's. Without either, print how to install it.
set -u
python=${1:-python3}
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null 2>&1 && exit 0
done
"$python" - <<'PY' && exit 0
import os, sys
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    sys.exit(not os.path.exists(playwright.chromium.executable_path))
PY
cat >&2 <<'MSG'
llaisys: the tests of the web UI need Chromium, which is not installed.
         Debian: apt-get install chromium-headless-shell
         Anywhere else: .venv/bin/playwright install chromium; then run make test again.
MSG
exit 1
