"""`llaisys` with scripted completions: `python scripted_server.py SCRIPT serve MODEL ...`.

Server, engine, core with its forward pass and KV cells, template, tokenizer and parsers are real. Only the
sampled token ids are replaced, with those of the script's text.

SCRIPT is a JSON file: a list of `{"after": REGEX, "text": TEXT}`. The completion is the text of the first
entry whose regular expression occurs in the prompt; `[[NAME]]` in it is the named group. No entry:
`DEFAULT_TEXT`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llaisys import _core
from llaisys.cli.main import main
from llaisys.engine.worker import inspect_model
from llaisys.text.tokenizer import Tokenizer, load_tokenizer

DEFAULT_TEXT = "Understood."
LOGITS = 1  # the flag of `wants_output` for a sampled id


class Script:
    """The completion of each prompt, as token ids of the model with an end of sequence."""

    def __init__(self, path: Path, tokenizer: Tokenizer, eos: int) -> None:
        self._entries = [
            (re.compile(e["after"], re.DOTALL), e["text"]) for e in json.loads(path.read_text("utf-8"))
        ]
        self._tokenizer, self._eos = tokenizer, eos

    def completion(self, prompt: list[int]) -> list[int]:
        """Return the token ids that follow the prompt."""
        shown = self._tokenizer.decode(prompt, False)
        for pattern, text in self._entries:
            if found := pattern.search(shown):
                filled = re.sub(r"\[\[(\w+)\]\]", lambda name: found[name[1]], text)
                return [*self._tokenizer.encode(filled, add_special_tokens=False), self._eos]
        return [*self._tokenizer.encode(DEFAULT_TEXT, add_special_tokens=False), self._eos]


class ScriptedContext:
    """The core's context, whose sequences with a sampler get the token ids of the script."""

    script_path = Path()

    def __init__(self, path: str, **settings: Any) -> None:
        self._context = _Context(path, **settings)
        info = inspect_model(Path(path))
        self._script = Script(self.script_path, load_tokenizer(info), info.eos_token_ids[0])
        # Sequence id -> length of its prompt, and its completion.
        self._completions: dict[int, tuple[int, list[int]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def set_sampler(
        self,
        seq_id: int,
        spec: _core.SamplerSpec,
        prompt_ids: NDArray[np.int32],
        output_ids: NDArray[np.int32],
    ) -> None:
        """Set the sampler of a sequence, and choose its completion."""
        self._context.set_sampler(seq_id, spec, prompt_ids, output_ids)
        self._completions[seq_id] = len(prompt_ids), self._script.completion(prompt_ids.tolist())

    def seq_release(self, seq_id: int) -> None:
        """Release a sequence id."""
        self._context.seq_release(seq_id)
        self._completions.pop(seq_id, None)

    def decode(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int32],
        n_seq_id: NDArray[np.int32],
        seq_ids: NDArray[np.int64],
        wants_output: NDArray[np.uint8],
        **masks: Any,
    ) -> SimpleNamespace:
        """Decode the rows; return the core's output with the script's token ids."""
        output = self._context.decode(tokens, positions, n_seq_id, seq_ids, wants_output, **masks)
        ids = output.token_ids.copy()
        for at, row in enumerate(output.rows.tolist()):
            scripted = self._completions.get(int(seq_ids[row]))
            if scripted is not None and wants_output[row] & LOGITS:
                n_prompt, completion = scripted
                ids[at] = completion[min(int(positions[row]) + 1 - n_prompt, len(completion) - 1)]
        fields = ("rows", "faults", "logprobs", "hidden", "graph_refusal")
        return SimpleNamespace(token_ids=ids, **{name: getattr(output, name) for name in fields})


_Context = _core.Context

if __name__ == "__main__":
    ScriptedContext.script_path = Path(sys.argv.pop(1))
    _core.Context = ScriptedContext  # type: ignore[misc, assignment]
    sys.exit(main())
