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


def test_stop_ids_and_stop_strings_end_an_answer(llm: LLM, golden: Golden) -> None:
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


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"stop": [""]}, "stop"),
    ],
)
def test_bad_parameters_name_the_field_and_the_bound(bad: dict[str, object], field: str) -> None:
    with pytest.raises(RejectedError, match=field) as caught:
        SamplingParams(**bad)  # type: ignore[arg-type]
    assert caught.value.param == field


def test_wrong_asks_are_refused_and_the_model_goes_on(llm: LLM, golden: Golden) -> None:
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
