"""IncrementalDetokenizer: whole characters, stop strings, counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llaisys.sampling_params import SamplingParams
from llaisys.text.detokenizer import IncrementalDetokenizer, TextDelta
from llaisys.text.tokenizer import Tokenizer

PLAIN = SamplingParams()
CHARACTERS = st.sampled_from("ab c\n\u00e9\u4f60\u597d\u4e16\u754c\U0001f980\U0001f468\u200d\U0001f469")


def stream_all(tokenizer: Tokenizer, ids: Sequence[int], params: SamplingParams) -> list[TextDelta]:
    """Push one id at a time, then finish as a last delta."""
    stream = IncrementalDetokenizer(tokenizer, params)
    deltas = [stream.push([id]) for id in ids]
    return [*deltas, TextDelta(stream.finish(), None, 0)]


def text_of(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


@given(ids=st.lists(st.integers(0, 151_700), max_size=60), skip=st.booleans())
def test_deltas_concatenate_to_the_full_decode(qwen: Tokenizer, ids: list[int], skip: bool) -> None:
    deltas = stream_all(qwen, ids, SamplingParams(skip_special_tokens=skip))
    assert text_of(deltas) == qwen.decode(ids, skip_special_tokens=skip)


@given(text=st.text(CHARACTERS, max_size=40))
def test_no_delta_ends_with_a_partial_character(tiny: Tokenizer, text: str) -> None:
    """With one byte per token, the shown text is always the longest prefix of whole characters."""
    ids = tiny.encode(text, add_special_tokens=False)
    stream = IncrementalDetokenizer(tiny, PLAIN)
    shown = ""
    for n, id in enumerate(ids, start=1):
        shown += stream.push([id]).text
        assert shown == b"".join(tiny.id_to_bytes(i) for i in ids[:n]).decode("utf-8", "ignore")
    assert shown == text
    assert stream.finish() == ""


def test_a_partial_character_at_the_end_becomes_a_replacement_character(tiny: Tokenizer) -> None:
    ids = tiny.encode("x\U0001f980", add_special_tokens=False)
    stream = IncrementalDetokenizer(tiny, PLAIN)
    assert stream.push(ids[:-1]).text == "x"
    assert stream.finish() == "\ufffd"


def expected(pieces: list[str], params: SamplingParams) -> tuple[str, str | None, int]:
    """Return shown text, stop string and kept tokens by trying every prefix of the text."""
    text, first = "".join(pieces), 0
    for n_tokens, piece in enumerate(pieces, start=1):
        for end in range(first + 1, first + len(piece) + 1):
            met = sorted((s for s in params.stop if text[:end].endswith(s)), key=len)
            if met and n_tokens > params.min_tokens:
                end_shown = end if params.include_stop_str_in_output else end - len(met[-1])
                return text[:end_shown], met[-1], n_tokens
        first += len(piece)
    return text, None, len(pieces)


STOPS = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=3)


@given(
    text=st.text("abc", max_size=24),
    stop=STOPS,
    cuts=st.lists(st.integers(1, 4), max_size=24),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
)
def test_stop_strings_match_their_definition_for_any_chunking(
    tiny: Tokenizer, text: str, stop: list[str], cuts: list[int], include: bool, min_tokens: int
) -> None:
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    ids = tiny.encode(text, add_special_tokens=False)
    want_text, want_stop, want_kept = expected([tiny.token_text(id) for id in ids], params)

    stream, deltas, rest = IncrementalDetokenizer(tiny, params), list[TextDelta](), ids
    for cut in [*cuts, len(ids)]:
        deltas.append(stream.push(rest[:cut]))
        rest = rest[cut:]
    assert text_of(deltas) + stream.finish() == want_text
    assert deltas[-1].stopped == want_stop
    assert sum(delta.n_tokens_kept for delta in deltas) == want_kept


@given(text=st.text("abc", max_size=24), stop=STOPS)
def test_only_the_start_of_a_stop_string_stays_pending(tiny: Tokenizer, text: str, stop: list[str]) -> None:
    stream, shown = IncrementalDetokenizer(tiny, SamplingParams(stop=stop)), ""
    seen = ""
    for id in tiny.encode(text, add_special_tokens=False):
        delta = stream.push([id])
        seen, shown = seen + tiny.token_text(id), shown + delta.text
        if delta.stopped is not None:
            break
        pending = seen[len(shown) :]
        longest = max((n for s in stop for n in range(len(s)) if seen.endswith(s[:n])), default=0)
        assert pending == seen[len(seen) - longest :]


def test_a_stop_string_across_tokens_is_never_shown(qwen: Tokenizer) -> None:
    ids = qwen.encode("One.\n\nUser: two", add_special_tokens=False)
    stream = IncrementalDetokenizer(qwen, SamplingParams(stop=["\n\nUser:"]))
    deltas = [stream.push([id]) for id in ids]
    assert text_of(deltas) == "One."
    assert deltas[-1].stopped == "\n\nUser:"
    assert stream.finish() == ""


def test_the_token_that_completes_the_stop_string_is_kept_and_later_ones_are_not(tiny: Tokenizer) -> None:
    stream = IncrementalDetokenizer(tiny, SamplingParams(stop="b"))
    assert stream.push(tiny.encode("xxbxx", add_special_tokens=False)) == TextDelta("xx", "b", 3)
    assert stream.push(tiny.encode("x", add_special_tokens=False)) == TextDelta("", "b", 0)


def test_text_after_the_stop_string_in_its_own_token_is_not_shown(tiny: Tokenizer) -> None:
    (abc,) = tiny.encode("abc", add_special_tokens=False)
    assert IncrementalDetokenizer(tiny, SamplingParams(stop="b")).push([abc]) == TextDelta("a", "b", 1)
    included = SamplingParams(stop="b", include_stop_str_in_output=True)
    assert IncrementalDetokenizer(tiny, included).push([abc]) == TextDelta("ab", "b", 1)


@pytest.mark.parametrize(("skip", "want"), [(True, "xx"), (False, "x<|end|>x")])
def test_special_tokens_are_left_out_on_request(tiny: Tokenizer, skip: bool, want: str) -> None:
    ids = tiny.encode("x<|end|>x", add_special_tokens=False)
    assert text_of(stream_all(tiny, ids, SamplingParams(skip_special_tokens=skip))) == want


def test_a_skipped_token_inside_a_character_does_not_break_it(tiny: Tokenizer) -> None:
    first, *rest = tiny.encode("\u4f60", add_special_tokens=False)
    (end,) = tiny.encode("<|end|>", add_special_tokens=False)
    assert text_of(stream_all(tiny, [first, end, *rest], PLAIN)) == "\u4f60"


@given(
    text=st.text(CHARACTERS, max_size=40),
    stop=st.lists(st.text(CHARACTERS, min_size=1, max_size=3), max_size=2),
)
def test_stop_strings_in_any_script(qwen: Tokenizer, text: str, stop: list[str]) -> None:
    params = SamplingParams(stop=stop)
    deltas = stream_all(qwen, qwen.encode(text, add_special_tokens=False), params)
    shown = text_of(deltas)
    assert not any(s in shown for s in stop)
    composed = qwen.decode(qwen.encode(text, add_special_tokens=False), skip_special_tokens=True)
    assert composed.startswith(shown)
    assert (deltas[-2].stopped if len(deltas) > 1 else None) is not None or shown == composed
