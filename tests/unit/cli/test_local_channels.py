"""A chat with a model of channels in a terminal: they are shown as other models' reasoning is."""

from __future__ import annotations

from typing import Any

import pytest

from fakes import text
from llaisys.cli.local_model import ChannelText
from llaisys.config import Config
from llaisys.output_formats import OutputFormats


@pytest.mark.parametrize(
    ("format", "completion"),
    [
        (
            "openai_gptoss",
            "<|channel|>analysis<|message|>Hm < 3.<|end|><|start|>assistant<|channel|>final<|message|>Yes <",
        ),
        ("gemma4", "<|channel>thought\nHm < 3.\n<channel|>Yes <"),
    ],
)
def test_reasoning_in_channels_is_shown_in_tags(format: Any, completion: str) -> None:
    formats = OutputFormats.of(Config(reasoning_parser=format), None, text.tokenizer())
    assert formats.has_channels
    for n in range(len(completion)):
        shown: list[str] = []
        channels = ChannelText(formats, [1], shown.append)
        channels.push(completion[:n])
        channels.push(completion[n:])
        channels.finish()
        assert "".join(shown) == "<think>\nHm < 3.\n</think>\n\nYes <"
