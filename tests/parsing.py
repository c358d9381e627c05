"""Parse completions in pieces, and check texts against grammars with a byte tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from fakes import text as fake_text
from llaisys.engine.grammar import GrammarCompiler, GrammarTokenizer
from llaisys.output_parts import Content, OutputParser, OutputPart, Reasoning
from llaisys.sampling_params import StructuredOutputsParams


def parsed(parser: OutputParser, pieces: Iterable[str], cut: bool = False) -> list[OutputPart]:
    """Return all parts, with adjacent parts of one kind merged."""
    joined: list[OutputPart] = []
    for part in [part for piece in pieces for part in parser.push(piece)] + parser.finish(cut=cut):
        assert not isinstance(part, Content | Reasoning) or part.text, "an empty part"
        last = joined[-1] if joined else None
        if isinstance(part, Content | Reasoning) and type(last) is type(part):
            joined[-1] = type(part)(last.text + part.text)  # type: ignore[union-attr]
        else:
            joined.append(part)
    return joined


def divided(text: str, positions: Iterable[int]) -> list[str]:
    """Split the text into pieces, some of them empty."""
    edges = [0, *sorted(position % (len(text) + 1) for position in positions), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


def byte_grammars() -> GrammarCompiler:
    """Return a compiler for the tokenizer of the fakes."""
    return GrammarCompiler(GrammarTokenizer(fake_text.tokenizer().to_json(), (256,), 300))


def takes(grammars: GrammarCompiler, grammar: str, text: str) -> bool:
    """Return True if the grammar accepts the text."""
    matcher = grammars.compile(StructuredOutputsParams(grammar=grammar))
    n_taken = matcher.try_consume_tokens(fake_text.tokenizer().encode(text, False))
    return n_taken == len(text.encode()) and matcher.is_accepting()
