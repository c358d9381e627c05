"""OutputProcessor: text, stop strings, stop ids, logprobs, and merged deltas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes import text
from llaisys.engine.engine_output import EngineOutput, TokenLogprobs
from llaisys.output_processor import OutputAccumulator, OutputProcessor, append_delta, empty_output
from llaisys.outputs import FinishReason, Logprob, RequestOutput
from llaisys.sampling_params import RequestOutputKind, SamplingParams

TOKENIZER = text.tokenizer()


def ids(shown: str) -> list[int]:
    return TOKENIZER.encode(shown, add_special_tokens=False)


def opened(**params: Any) -> OutputProcessor:
    processor = OutputProcessor(TOKENIZER)
    processor.add("r", "prompt", [1, 2], SamplingParams(**params))
    return processor


def news(new: list[int], reason: FinishReason | None = None, stop: int | None = None) -> EngineOutput:
    return EngineOutput("r", new, None, reason, stop)


def test_a_delta_has_the_new_output() -> None:
    processor = opened()
    first = processor.process(news(ids("ab")))
    second = processor.process(news(ids("c"), FinishReason.LENGTH))
    assert (first.outputs[0].text, first.finished, first.outputs[0].finish_reason) == ("ab", False, None)
    assert (second.outputs[0].text, second.outputs[0].token_ids) == ("c", ids("c"))
    assert (second.finished, second.outputs[0].finish_reason) == (True, "length")
    assert (first.prompt, first.prompt_token_ids) == ("prompt", [1, 2])
    assert "r" not in processor


def test_a_partial_character_is_held_back() -> None:
    processor = opened()
    a, b = ids("é")
    assert processor.process(news([a])).outputs[0].text == ""
    assert processor.process(news([b])).outputs[0].text == "é"
    assert processor.process(news([a], FinishReason.LENGTH)).outputs[0].text == "\ufffd"


@pytest.mark.parametrize(("include", "shown"), [(False, "a"), (True, "ab")])
def test_an_id_that_ends_the_completion_counts_and_is_shown_on_request(include: bool, shown: str) -> None:
    processor = opened(include_stop_str_in_output=include, stop_token_ids=ids("b"))
    delta = processor.process(news(ids("ab"), FinishReason.STOP, ids("b")[0]))
    assert (delta.outputs[0].text, delta.outputs[0].token_ids) == (shown, ids("ab"))
    assert (delta.outputs[0].finish_reason, delta.outputs[0].stop_reason) == ("stop", ids("b")[0])


def test_eos_is_never_shown() -> None:
    delta = opened().process(news([*ids("a"), text.EOS], FinishReason.STOP))
    assert (delta.outputs[0].text, delta.outputs[0].stop_reason) == ("a", None)
    assert delta.outputs[0].token_ids == [*ids("a"), text.EOS]


def test_a_stop_string_ends_the_completion_before_the_engine() -> None:
    processor = opened(stop=["cd"])
    assert processor.process(news(ids("abc"))).outputs[0].text == "ab"
    event = news(ids("dxyz"))
    delta = processor.process(event)
    assert (delta.finished, event.finish_reason) == (True, None)
    assert (delta.outputs[0].text, delta.outputs[0].token_ids) == ("", ids("d"))
    assert (delta.outputs[0].finish_reason, delta.outputs[0].stop_reason) == ("stop", "cd")
    assert "r" not in processor
    with pytest.raises(KeyError):
        processor.process(news(ids("z")))


def test_a_stop_string_wins_over_the_length_it_falls_on() -> None:
    delta = opened(stop=["b"]).process(news(ids("ab"), FinishReason.LENGTH))
    assert (delta.outputs[0].finish_reason, delta.outputs[0].stop_reason) == ("stop", "b")


def test_pending_text_of_a_stop_string_is_shown_at_the_end() -> None:
    processor = opened(stop=["cd"])
    assert processor.process(news(ids("abc"), FinishReason.LENGTH)).outputs[0].text == "abc"


def test_logprobs_name_their_tokens_and_follow_the_kept_ids() -> None:
    processor = opened(stop=["b"], logprobs=1)
    a, b, c = ids("abc")
    entries = [TokenLogprobs(a, -0.5, 1, [(a, -0.5)]), TokenLogprobs(b, -2.0, 7, [(c, -0.1)])]
    first = processor.process(EngineOutput("r", [a], entries[:1]))
    over_run = TokenLogprobs(c, -9.0, 1, [])
    second = processor.process(EngineOutput("r", [b, c], [entries[1], over_run]))
    assert first.outputs[0].logprobs is not None
    assert [(k, v.logprob, v.rank, v.decoded_token) for k, v in first.outputs[0].logprobs[0].items()] == [
        (a, -0.5, 1, "a")
    ]
    assert second.outputs[0].logprobs is not None
    assert [(k, v.rank, v.decoded_token) for k, v in second.outputs[0].logprobs[0].items()] == [
        (b, 7, "b"),
        (c, 1, "c"),
    ]
    assert len(second.outputs[0].logprobs) == 1
    assert second.outputs[0].cumulative_logprob == -2.5


def test_requested_ids_have_no_rank_of_their_own() -> None:
    a, b, c = ids("abc")
    processor = opened(logprob_token_ids=[c, a])
    entry = TokenLogprobs(a, -1.5, 2, [(c, -9.0), (a, -1.5)])
    (named,) = processor.process(EngineOutput("r", [a], [entry])).outputs[0].logprobs or ()
    assert named == {a: Logprob(-1.5, 2, "a"), c: Logprob(-9.0, None, "c")}
    assert b not in named


def test_no_logprobs_unless_requested() -> None:
    answer = opened().process(news(ids("a"))).outputs[0]
    assert (answer.logprobs, answer.cumulative_logprob) == (None, None)


def test_discard_removes_a_request_once() -> None:
    processor = opened()
    assert processor.discard("r")
    assert not processor.discard("r")


def whole(processor: OutputProcessor, pushes: list[list[int]]) -> RequestOutput:
    result = empty_output("r", "prompt", [1, 2])
    for i, push in enumerate(pushes):
        append_delta(
            result, processor.process(news(push, FinishReason.LENGTH if i == len(pushes) - 1 else None))
        )
        if result.finished:
            break
    return result


@given(st.text(max_size=40), st.lists(st.integers(0, 40)), st.sampled_from([(), ("a",), ("ab", "0")]))
def test_the_merged_deltas_do_not_depend_on_the_chunking(
    shown: str, cuts: list[int], stop: tuple[str, ...]
) -> None:
    new = ids(shown)
    edges = [0, *sorted(min(cut, len(new)) for cut in cuts), len(new)]
    pushes = [new[a:b] for a, b in itertools.pairwise(edges)]
    assert whole(opened(stop=stop), pushes) == whole(opened(stop=stop), [new])


# --- several choices ---


def choice(
    index: int, new: list[int], reason: FinishReason | None = None, *, last: bool = False
) -> EngineOutput:
    return EngineOutput("r", new, None, reason, index=index, last=last)


def test_choices_have_their_own_text_and_the_request_ends_once() -> None:
    processor = opened(n=2, stop=["z"])
    result = empty_output("r", "prompt", [1, 2], 2)
    for event in (
        choice(0, ids("ab")),
        choice(1, ids("x")),
        choice(1, ids("yz")),
        choice(0, ids("c"), FinishReason.LENGTH),
    ):
        assert processor.expects(event)
        delta = processor.process(event)
        assert [answer.index for answer in delta.outputs] == [event.index]
        append_delta(result, delta)
    assert [(a.index, a.text, a.finish_reason) for a in result.outputs] == [
        (0, "abc", "length"),
        (1, "xy", "stop"),
    ]
    assert result.finished
    assert "r" not in processor


def test_output_after_the_end_of_a_choice_is_ignored() -> None:
    processor = opened(n=2, stop=["b"])
    assert processor.process(choice(1, ids("b"))).finished is False
    assert not processor.expects(choice(1, ids("c")))
    assert processor.expects(choice(0, ids("c")))
    assert not processor.expects(choice(2, ids("c")))
    assert "r" in processor
    assert processor.discard("r")
    assert not processor.expects(choice(0, ids("c")))


def test_a_delta_of_another_choice_is_appended() -> None:
    processor = opened(n=2)
    merged = processor.process(choice(1, ids("a")))
    append_delta(merged, processor.process(choice(0, ids("b"))))
    append_delta(merged, processor.process(choice(1, ids("c"))))
    assert [(a.index, a.text) for a in merged.outputs] == [(1, "ac"), (0, "b")]


def test_counts_of_a_prediction_stay_at_their_last_values() -> None:
    """An output without verified drafts has zeros; the merged completion keeps the newest counts."""
    processor = opened()
    whole = empty_output("r", None, [1, 2])
    for accepted, rejected in ((2, 1), (0, 0), (5, 1)):
        output = news(ids("ab"))
        output.num_accepted_prediction_tokens, output.num_rejected_prediction_tokens = accepted, rejected
        append_delta(whole, processor.process(output))
    append_delta(whole, processor.process(news(ids("c"), FinishReason.LENGTH)))
    assert (whole.usage.accepted_prediction_tokens, whole.usage.rejected_prediction_tokens) == (5, 1)


def test_a_stop_string_cuts_an_output_of_several_tokens() -> None:
    processor = opened(stop=["bc"])
    delta = processor.process(news(ids("abcdef")))
    assert (delta.outputs[0].text, delta.outputs[0].finish_reason) == ("a", "stop")
    assert delta.outputs[0].token_ids == ids("abc")


def test_without_detokenize_there_is_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is not used at all."""
    processor = OutputProcessor(TOKENIZER)
    for name in ("id_to_bytes", "token_text", "is_special"):
        monkeypatch.delattr(f"llaisys.text.tokenizer.Tokenizer.{name}")
    params = SamplingParams(detokenize=False, logprobs=1, prompt_logprobs=0)
    processor.add("r", None, [1, 2], params)
    entry = TokenLogprobs(97, -0.5, 1, [(97, -0.5), (98, -1.5)])
    delta = processor.process(
        EngineOutput("r", [97], [entry], new_prompt_logprobs=[TokenLogprobs(2, -1.0, 3, [])])
    )
    end = processor.process(EngineOutput("r", [98], [entry], FinishReason.LENGTH))
    (choice,) = delta.outputs
    assert (choice.text, choice.token_ids, choice.logprobs) == (
        "",
        [97],
        [{97: Logprob(-0.5, 1, None), 98: Logprob(-1.5, 2, None)}],
    )
    assert list(delta.prompt_logprobs or ()) == [None, {2: Logprob(-1.0, 3, None)}]
    assert (end.outputs[0].text, end.outputs[0].token_ids, end.finished) == ("", [98], True)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_accumulator_gives_outputs_of_its_kind(kind: RequestOutputKind) -> None:
    processor = opened(n=2, logprobs=0)
    accumulator = OutputAccumulator(kind, empty_output("r", "prompt", [1, 2], 2))

    def step(shown: str, index: int, reason: FinishReason | None = None) -> RequestOutput | None:
        entries = [TokenLogprobs(i, -0.5, 1, []) for i in ids(shown)]
        return accumulator.add(processor.process(EngineOutput("r", ids(shown), entries, reason, index=index)))

    outputs = [
        step("a", 0),
        step("x", 1),
        step("b", 0, FinishReason.LENGTH),
        step("y", 1, FinishReason.LENGTH),
    ]
    shown = [
        None if o is None else [(c.index, c.text, len(c.logprobs or ())) for c in o.outputs] for o in outputs
    ]
    assert (
        shown
        == {
            RequestOutputKind.CUMULATIVE: [
                [(0, "a", 1), (1, "", 0)],
                [(0, "a", 1), (1, "x", 1)],
                [(0, "ab", 2), (1, "x", 1)],
                [(0, "ab", 2), (1, "xy", 2)],
            ],
            RequestOutputKind.DELTA: [[(0, "a", 1)], [(1, "x", 1)], [(0, "b", 1)], [(1, "y", 1)]],
            RequestOutputKind.FINAL_ONLY: [None, None, None, [(0, "ab", 2), (1, "xy", 2)]],
        }[kind]
    )
    assert [o is not None and o.finished for o in outputs] == [False, False, False, True]
    if kind is RequestOutputKind.CUMULATIVE:
        assert outputs[2] is not None
        assert [c.finish_reason for c in outputs[2].outputs] == ["length", None]
