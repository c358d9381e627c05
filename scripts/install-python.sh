#!/usr/bin/env bash
# Installs the package's dependencies and the development tools into the virtual environment of $1, at the
# versions of requirements.lock. The package itself follows with `maturin develop`.
set -u
python=$1
echo "installing Python packages into .venv"
wanted=$("$python" - <<'PY'
import re
text = open("pyproject.toml", encoding="utf-8").read()
def block(name: str) -> list[str]:
    body = re.search(rf"^{name} = \[\n(.*?)^\]", text, re.S | re.M).group(1)
    return re.findall(r'"([^"]+)"', body)
print(" ".join(block("dependencies") + block("dev")))
PY
)
# shellcheck disable=SC2086 # one word each, no spaces inside
if ! "$python" -m pip install --quiet --disable-pip-version-check -c requirements.lock $wanted; then
  cat >&2 <<'MSG'
llaisys: pip could not install the Python packages (see above).
         If the network or the package index is not available, point pip at a mirror
         (pip config set global.index-url URL) or a folder of wheels (PIP_FIND_LINKS=DIR PIP_NO_INDEX=1)
         and run the same make command again.
MSG
  exit 1
fi
