"""Starts the scripted server (`scripted_server.py`) and makes its model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import gguf

from llaisys.hub.embedded import find, target
from parity.gguf_files import write_like
from serving import NO_SPECULATION, Server, serving

FOLDER = Path(__file__).parent
# Agents send system prompts and tools of 6,000 to 30,000 tokens.
CONTEXT = 65_536
Entry = tuple[str, str]


def call_text(name: str, **arguments: str) -> str:
    """Return a tool call in the format of the template."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


@contextmanager
def scripted_serving(folder: Path, script: Sequence[Entry], *flags: str, key: str) -> Iterator[Server]:
    """Start the server with SmolLM2's tokenizer and one of its layers.

    `script`: regular expressions of prompts, and completions. The first that matches applies.
    """
    path = folder / "script.json"
    path.write_text(json.dumps([{"after": after, "text": text} for after, text in script]), "utf-8")
    flags = (
        *(
            "--max-model-len",
            str(CONTEXT),
            "--num-kv-cells",
            str(2 * CONTEXT),
            "--max-num-batched-tokens",
            "2048",
        ),
        *("--chat-template", str(FOLDER / "tools.jinja"), "--reasoning-parser", "qwen3", *flags),
        # The core verifies drafts with the tokens that it sampled, not with those of the script.
        *NO_SPECULATION,
    )
    program = (sys.executable, str(FOLDER / "scripted_server.py"), str(path))
    with serving(folder, str(one_layer(folder)), *flags, key=key, program=program) as server:
        yield server


def one_layer(folder: Path) -> Path:
    """Write SmolLM2 with its first layer only and a longer context: long prompts then take seconds.

    Its sampled tokens are replaced, so the other 29 layers would have no effect.
    """
    entry = find("smollm2")
    assert entry is not None
    source, copy = target(entry), folder / "one-layer.gguf"
    tensors = {
        tensor.name: (
            tensor.tensor_type.name,
            tuple(int(n) for n in tensor.shape[::-1]),
            tensor.data.tobytes(),
        )
        for tensor in gguf.GGUFReader(source).tensors
        if not tensor.name.startswith("blk.") or tensor.name.startswith("blk.0.")
    }
    write_like(source, copy, tensors)
    reader = gguf.GGUFReader(copy, "r+")
    for name, value in {"llama.block_count": 1, "llama.context_length": CONTEXT}.items():
        field = reader.fields[name]
        field.parts[field.data[0]][0] = value
    reader.data.flush()
    return copy
