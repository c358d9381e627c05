"""A chat with gpt-oss in a terminal: its channels are shown as other models' reasoning is."""

from __future__ import annotations

from fakes import text
from llaisys.cli.local_model import ChannelText
from llaisys.config import Config
from llaisys.output_formats import OutputFormats


def test_reasoning_in_channels_is_shown_in_tags() -> None:
    formats = OutputFormats.of(Config(reasoning_parser="openai_gptoss"), None, text.tokenizer())
    completion = (
        "<|channel|>analysis<|message|>Hm < 3.<|end|><|start|>assistant<|channel|>final<|message|>Yes <"
    )
    for n in range(len(completion)):
        shown: list[str] = []
        channels = ChannelText(formats, [1], shown.append)
        channels.push(completion[:n])
        channels.push(completion[n:])
        channels.finish()
        assert "".join(shown) == "<think>\nHm < 3.\n</think>\n\nYes <"
