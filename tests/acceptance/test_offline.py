"""The offline API: LLM.generate and LLM.chat, with vLLM-shaped results."""

from __future__ import annotations

import pytest

from golden import FOLDER, Golden
from llaisys import LLM, SamplingParams
from llaisys.errors import RejectedError

pytestmark = pytest.mark.stage1
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(FOLDER), dtype="float32")


def test_all_prompt_forms_give_the_same(llm: LLM) -> None:
    text = "def main(): return 1"
    ids = llm.generate(text, GREEDY)[0].prompt_token_ids
    forms = [text, {"prompt": text}, {"prompt_token_ids": ids}]
    outputs = [o.outputs[0].token_ids for form in forms for o in llm.generate(form, GREEDY)]
    outputs += [o.outputs[0].token_ids for o in llm.generate(forms, GREEDY)]
    assert len(outputs) == 6
    assert all(o == outputs[0] for o in outputs)


def test_results_keep_the_order_and_the_shape(llm: LLM, golden: Golden) -> None:
    prompts = [{"prompt_token_ids": p} for p in golden.prompts]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, logprobs=2) for n in (3, 5, 7)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in outputs] == golden.prompts
    for output, param, greedy in zip(outputs, params, golden.greedy, strict=True):
        (answer,) = output.outputs
        assert output.finished
        assert answer.token_ids == greedy[: param.max_tokens]
        assert (answer.finish_reason, answer.stop_reason) == ("length", None)
        assert answer.logprobs is not None
        assert [max(step, key=lambda t: step[t].logprob) for step in answer.logprobs] == answer.token_ids
        assert len({output.request_id for output in outputs}) == 3


def test_stop_ids_and_stop_strings_end_a_completion(llm: LLM, golden: Golden) -> None:
    prompt, greedy = {"prompt_token_ids": golden.prompts[1]}, golden.greedy[1]
    at = next(i for i in range(2, 24) if greedy[i] not in greedy[:i])
    by_id = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=[greedy[at]])
    answer = llm.generate(prompt, by_id)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", greedy[at])
    assert answer.token_ids == greedy[: at + 1]
    full = llm.generate(prompt, GREEDY)[0].outputs[0].text
    stop = full[3:5]
    by_text = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=[stop])
    answer = llm.generate(prompt, by_text)[0].outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == full[: full.index(stop)]


def test_more_prompts_than_the_queue_and_the_batch_hold(golden: Golden) -> None:
    with LLM(str(FOLDER), dtype="float32", max_num_seqs=4, max_num_queued_reqs=8) as small:
        outputs = small.generate([{"prompt_token_ids": golden.prompts[1]}] * 100, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [golden.greedy[1]] * 100


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    one = [{"role": "user", "content": "hello"}]
    (single,) = llm.chat(one, GREEDY)
    both = llm.chat([one, one], GREEDY)
    assert single.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert [o.outputs[0].token_ids for o in both] == [single.outputs[0].token_ids] * 2


def test_usage_counts_prompt_and_completion_tokens(llm: LLM, golden: Golden) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=7, ignore_eos=True, n=3)
    prompt = golden.prompts[2]
    (output,) = llm.generate({"prompt_token_ids": prompt}, params)
    usage = output.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 21)
    assert usage.total_tokens == len(prompt) + 21
    (again,) = llm.generate({"prompt_token_ids": prompt}, params)
    assert again.usage.cached_tokens == len(prompt) - 1  # the last token's logits are computed each time


def test_a_stream_gives_the_same_completions_in_pieces(llm: LLM, golden: Golden) -> None:
    prompts = [{"prompt_token_ids": p} for p in golden.prompts]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=9, ignore_eos=True, n=2, logprobs=1)
    wholes = llm.generate(prompts, params)
    joined: dict[tuple[int, int], list[object]] = {}
    finished = []
    ids: dict[str, None] = {}
    n_deltas = 0
    for delta in llm.generate(prompts, params, stream=True):
        ids.setdefault(delta.request_id)
        n_deltas += 1
        for output in delta.outputs:
            pieces = joined.setdefault((int(delta.request_id), output.index), ["", [], [], None])
            pieces[0] += output.text  # type: ignore[operator]
            pieces[1] += output.token_ids  # type: ignore[operator]
            pieces[2] += output.logprobs or []  # type: ignore[operator]
            pieces[3] = output.finish_reason
        finished += [delta.request_id] if delta.finished else []
    assert n_deltas > 2 * len(prompts)  # pieces, not whole completions
    assert sorted(finished) == sorted(ids)  # each request ends once
    first = min(map(int, ids))  # ids ascend in the order of the prompts
    want = {
        (first + i, answer.index): [answer.text, answer.token_ids, answer.logprobs, answer.finish_reason]
        for i, whole in enumerate(wholes)
        for answer in whole.outputs
    }
    assert joined == want


def test_chat_streams(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (whole,) = llm.chat(messages, GREEDY)
    deltas = list(llm.chat(messages, GREEDY, stream=True))
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.outputs[0].text
    assert [token for delta in deltas for token in delta.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]


def test_a_stream_checks_at_once_and_closing_it_cancels(golden: Golden) -> None:
    with LLM(str(FOLDER), dtype="float32", max_num_seqs=1, max_num_queued_reqs=0) as llm:
        with pytest.raises(RejectedError, match="600"):
            llm.generate({"prompt_token_ids": [600]}, GREEDY, stream=True)
        never_read = llm.generate({"prompt_token_ids": golden.prompts[0]}, GREEDY, stream=True)
        long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        stream = llm.generate({"prompt_token_ids": golden.prompts[0]}, long, stream=True)
        next(stream)
        stream.close()  # type: ignore[attr-defined]  # a generator
        # Only one request may run, so this one runs after the closed stream has ended.
        (after,) = llm.generate({"prompt_token_ids": golden.prompts[0]}, GREEDY)
        assert after.outputs[0].token_ids == golden.greedy[0]
        assert len(list(never_read)) > 1


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "logit_bias", "bad_words"])
def test_none_means_none(field: str, llm: LLM, golden: Golden) -> None:
    """None is the default, as in vLLM."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, **{field: None})  # type: ignore[arg-type]
    assert params == GREEDY
    (output,) = llm.generate({"prompt_token_ids": golden.prompts[0]}, params)
    assert output.outputs[0].token_ids == golden.greedy[0]


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -2}, "logprobs"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_bad_parameters_name_the_field_and_the_bound(bad: dict[str, object], field: str) -> None:
    with pytest.raises(RejectedError, match=field) as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    assert caught.value.param == field


def test_invalid_requests_are_rejected_and_the_model_stays_usable(llm: LLM, golden: Golden) -> None:
    for prompt, says in (
        ({"prompt_token_ids": [600]}, "600"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [1] * 513}, "512"),
    ):
        with pytest.raises(RejectedError, match=says):
            llm.generate(prompt, GREEDY)
    with pytest.raises(ValueError, match="2"):
        llm.generate([{"prompt_token_ids": [1]}] * 3, [GREEDY] * 2)
    (again,) = llm.generate({"prompt_token_ids": golden.prompts[0]}, GREEDY)
    assert again.outputs[0].token_ids == golden.greedy[0]


def test_an_unknown_setting_is_named() -> None:
    with pytest.raises(ValueError, match="max_num_sequences"):
        LLM(str(FOLDER), max_num_sequences=3)


def test_close_is_idempotent_and_final(golden: Golden) -> None:
    with LLM(str(FOLDER)) as llm:
        pass
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        llm.generate({"prompt_token_ids": golden.prompts[0]}, GREEDY)
