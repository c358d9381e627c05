"""A process that tests start beside a GPU: loads a model, answers prompts, says what it met. One JSON object
in (`model`, `settings`, `prompts`, `params`, `again`), one out (`token_ids`, `errors`)."""

from __future__ import annotations

import json
import sys
from typing import Any

from llaisys import LLM, SamplingParams
from llaisys.errors import LlaisysError


def answered(order: dict[str, Any], said: dict[str, Any]) -> None:
    """Loads and answers; the error that ends it is noted."""
    try:
        with LLM(order["model"], **order["settings"]) as llm:
            params = SamplingParams(**order["params"])
            prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
            answers = llm.generate(prompts, params, use_tqdm=False)
            said["token_ids"] = [answer.outputs[0].token_ids for answer in answers]
    except LlaisysError as error:
        said["errors"].append([type(error).__name__, str(error)])


def main() -> None:
    """`again`: settings with which the same is asked once more in this process."""
    order = json.loads(sys.argv[1])
    said: dict[str, Any] = {"errors": []}
    answered(order, said)
    if "again" in order:
        answered({**order, "settings": order["again"]}, said)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
