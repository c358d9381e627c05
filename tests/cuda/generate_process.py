"""A process that tests start with a GPU: it loads a model, generates completions and reports errors.

The argument is one JSON object (`model`, `settings`, `prompts`, `params`, `again`). The output is another
(`token_ids`, `errors`).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from llaisys import LLM, SamplingParams
from llaisys.errors import LlaisysError


def generate(order: dict[str, Any], report: dict[str, Any]) -> None:
    """Load the model and generate; write the token ids, or the error, to `report`."""
    try:
        with LLM(order["model"], **order["settings"]) as llm:
            params = SamplingParams(**order["params"])
            prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
            results = llm.generate(prompts, params, use_tqdm=False)
            report["token_ids"] = [result.outputs[0].token_ids for result in results]
    except LlaisysError as error:
        report["errors"].append([type(error).__name__, str(error)])


def main() -> None:
    """Generate once, and a second time in this process with the settings `again` if there are any."""
    order = json.loads(sys.argv[1])
    report: dict[str, Any] = {"errors": []}
    generate(order, report)
    if "again" in order:
        generate({**order, "settings": order["again"]}, report)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
