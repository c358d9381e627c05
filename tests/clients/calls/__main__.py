"""Typical calls of client libraries, against the servers of the arguments.

Runs in .venv-clients, which has no LLAISYS. Prints one line per call; exits with 1 if one failed.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from datetime import datetime, timezone
from importlib.metadata import version

from call_list import CALLS

# Each adds its calls to CALLS.
MODULES = (
    "langchain_openai_calls",
    "langchain_anthropic_calls",
    "langchain_ollama_calls",
    "litellm_calls",
    "litellm_proxy_calls",
    "llm_calls",
)


def main() -> int:
    """Run all calls; return the exit code."""
    for module in MODULES:
        importlib.import_module(module)
    libraries = dict.fromkeys(library for library, _, _ in CALLS)
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    print(f"# make test-clients, {datetime.now(timezone.utc):%Y-%m-%d}: {versions}", flush=True)
    n_failed = 0
    for library, name, function in CALLS:
        try:
            function()
        except Exception as e:  # noqa: BLE001 -- every call gets its line
            n_failed += 1
            print(f"FAILED  {library:20} {name}: {type(e).__name__}: {str(e)[:200]}", flush=True)
            traceback.print_exc()
        else:
            print(f"ok      {library:20} {name}", flush=True)
    print(f"{len(CALLS) - n_failed} of {len(CALLS)} calls")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
