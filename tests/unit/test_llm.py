"""LLM on the fake core: prompt forms, order, many prompts, threads, and shutdown."""

from __future__ import annotations

import functools
import gc
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tqdm import tqdm

import llaisys
from fakes import core, text
from llaisys import LLM, SamplingParams
from llaisys.errors import ContextLengthError, EngineDeadError, RejectedError, UnsupportedError
from llaisys.output_processor import OutputProcessor
from llaisys.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
pytestmark = pytest.mark.usefixtures("fake_model")


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("fake", num_kv_cells=1024) as made:
        yield made


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def prompt(*ids: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(ids)}


def test_every_form_of_a_prompt(llm: LLM) -> None:
    ids = text.tokenizer().encode("hi", True)
    for form in ("hi", {"prompt": "hi"}, {"prompt_token_ids": ids}, ids, tuple(ids)):
        (output,) = llm.generate(form, GREEDY)
        assert output.prompt_token_ids == ids
        assert tokens([output]) == [core.answer(ids, 10)]
        assert output.prompt == (None if form != "hi" and form != {"prompt": "hi"} else "hi")
    outputs = llm.generate(["hi", {"prompt": "hi"}, {"prompt_token_ids": ids}, ids], GREEDY)
    assert tokens(outputs) == [core.answer(ids, 10)] * 4
    assert llm.generate([], GREEDY) == []


def test_a_whole_completion(llm: LLM) -> None:
    (output,) = llm.generate(prompt(1, 2), SamplingParams(temperature=0, max_tokens=3, logprobs=1))
    (answer,) = output.outputs
    assert output.finished
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == 3
    times = output.metrics
    assert times.queued_ts <= times.scheduled_ts <= times.first_token_ts <= times.last_token_ts
    assert answer.text == text.tokenizer().decode(answer.token_ids, True)
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
    assert answer.logprobs is not None
    assert [next(iter(step)) for step in answer.logprobs] == answer.token_ids
    assert answer.cumulative_logprob == -1.5


def test_a_thousand_prompts_through_a_queue_of_256(llm: LLM) -> None:
    prompts = [prompt(i % 200, i // 200) for i in range(1000)]
    outputs = llm.generate(
        prompts, [SamplingParams(temperature=0, max_tokens=1 + i % 7) for i in range(1000)]
    )
    assert [o.prompt_token_ids for o in outputs] == [p["prompt_token_ids"] for p in prompts]
    assert tokens(outputs) == [core.answer(p["prompt_token_ids"], 1 + i % 7) for i, p in enumerate(prompts)]
    assert len({o.request_id for o in outputs}) == 1000


@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 1, "max_num_queued_reqs": 0}, {"num_kv_cells": 130}, {"max_num_batched_tokens": 3}],
)
def test_tokens_do_not_depend_on_the_capacity(settings: dict[str, int]) -> None:
    prompts = [prompt(*range(i, i + 5)) for i in range(30)]
    with LLM("fake", **settings) as small:
        assert tokens(small.generate(prompts, GREEDY)) == [
            core.answer(p["prompt_token_ids"], 10) for p in prompts
        ]


def test_stop_strings_and_stop_ids(llm: LLM) -> None:
    ids = core.answer([1, 2], 10)
    shown = text.tokenizer().decode(ids, True)
    by_text, by_id = llm.generate(
        [prompt(1, 2)] * 2,
        [
            SamplingParams(temperature=0, max_tokens=100, stop=shown[4]),
            SamplingParams(temperature=0, max_tokens=100, stop_token_ids=[ids[4]]),
        ],
    )
    assert by_text.outputs[0].text == shown[: shown.index(shown[4])]
    assert (by_text.outputs[0].finish_reason, by_text.outputs[0].stop_reason) == ("stop", shown[4])
    assert by_id.outputs[0].token_ids == ids[:5]
    assert (by_id.outputs[0].finish_reason, by_id.outputs[0].stop_reason) == ("stop", ids[4])


def test_eos_ends_and_is_not_text(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=9, logit_bias={256: 100.0})
    (output,) = llm.generate(prompt(1), params)
    assert (output.outputs[0].token_ids, output.outputs[0].text) == ([256], "")
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_the_models_defaults_are_used_without_parameters(llm: LLM) -> None:
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
    assert tokens(llm.generate(prompt(1))) == [core.answer([1], 16)]


def test_chat_takes_one_conversation_or_many(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    (single,) = llm.chat(one, GREEDY)
    assert single.prompt == "user:hi;>"
    assert tokens(llm.chat([one, one], GREEDY)) == tokens([single]) * 2
    assert llm.chat(one, GREEDY, add_generation_prompt=False)[0].prompt == "user:hi;"
    assert llm.chat([], GREEDY) == []


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        (prompt(), RejectedError, "empty"),
        (prompt(300), RejectedError, "300"),
        (prompt(*[1] * 120), ContextLengthError, "128 tokens"),
        ({"text": "hi"}, RejectedError, "prompt_token_ids"),
        ({"prompt_token_ids": ["hi"]}, RejectedError, "'hi'"),
        ([1, "hi"], RejectedError, "'hi'"),
    ],
)
def test_invalid_requests_are_rejected_before_any_runs(
    llm: LLM, bad: Any, error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        llm.generate([prompt(1), bad] if isinstance(bad, dict) else bad, GREEDY)
    assert tokens(llm.generate(prompt(1), GREEDY)) == [core.answer([1], 10)]


def test_parameters_are_one_for_all_or_one_each(llm: LLM) -> None:
    with pytest.raises(RejectedError, match="3 prompts and 2 sampling_params"):
        llm.generate([prompt(1)] * 3, [GREEDY] * 2)


def test_a_faulty_row_does_not_stop_the_other_requests(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    outputs = llm.generate([prompt(1), prompt(core.NON_FINITE), prompt(2)], GREEDY)
    assert [o.outputs[0].finish_reason for o in outputs] == ["length", "error", "length"]
    assert tokens(outputs) == [core.answer([1], 10), [], core.answer([2], 10)]
    assert "not finite" in caplog.text


def test_a_timeout_applies_only_if_set(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []
    submit = llm._engine.client.submit
    monkeypatch.setattr(llm._engine.client, "submit", lambda r: deadlines.append(r.deadline_s) or submit(r))
    llm.generate(prompt(1), GREEDY)
    assert deadlines == [math.inf]
    with LLM("fake", request_timeout_s=1e-9) as hurried:
        assert hurried.generate(prompt(1), GREEDY)[0].outputs[0].finish_reason == "timeout"


def test_a_dead_engine_is_raised(llm: LLM) -> None:
    with pytest.raises(EngineDeadError, match="device is lost"):
        llm.generate([prompt(1), prompt(core.DEADLY)], GREEDY)
    with pytest.raises(EngineDeadError):
        llm.generate(prompt(1), GREEDY)


def test_several_threads_share_one_model() -> None:
    with (
        LLM("fake", num_kv_cells=1024, max_num_seqs=3, max_num_queued_reqs=4) as shared,
        ThreadPoolExecutor(6) as pool,
    ):
        calls = [pool.submit(shared.generate, [prompt(i, j) for j in range(20)], GREEDY) for i in range(6)]
        for i, call in enumerate(calls):
            assert tokens(call.result(60)) == [core.answer([i, j], 10) for j in range(20)]


def test_an_interrupted_call_cancels_open_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    process = OutputProcessor.process

    def interrupted(processor: OutputProcessor, event: Any) -> RequestOutput:
        process(processor, event)
        raise KeyboardInterrupt

    monkeypatch.setattr(OutputProcessor, "process", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(i) for i in range(100)], SamplingParams(temperature=0, max_tokens=100))
    monkeypatch.setattr(OutputProcessor, "process", process)
    assert tokens(llm.generate([prompt(i) for i in range(100)], GREEDY)) == [
        core.answer([i], 10) for i in range(100)
    ]


def test_several_choices_of_many_prompts(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=6, logprobs=0)
    outputs = llm.generate([prompt(i % 200, 1) for i in range(300)], params)
    for i, output in enumerate(outputs):
        specs = [core.SamplerSpec(temperature=1.0, seed=9, choice=index) for index in range(3)]
        assert [answer.index for answer in output.outputs] == [0, 1, 2]
        want = [core.answer([i % 200, 1], 6, spec) for spec in specs]
        assert [answer.token_ids for answer in output.outputs] == want
        assert {answer.finish_reason for answer in output.outputs} == {"length"}
        assert output.finished
    with pytest.raises(RejectedError, match="n is 65, allowed are up to 64"):
        llm.generate(prompt(1), SamplingParams(n=65))


def test_a_stop_string_ends_its_choice_alone(llm: LLM) -> None:
    params = {"n": 3, "temperature": 1.0, "seed": 9, "max_tokens": 40}
    (plain,) = llm.generate(prompt(1), SamplingParams(**params))
    stop = plain.outputs[1].text[3]
    (output,) = llm.generate(prompt(1), SamplingParams(**params, stop=stop))
    for whole, cut in zip(plain.outputs, output.outputs, strict=True):
        assert cut.text == whole.text.split(stop)[0]
        assert cut.finish_reason == ("stop" if stop in whole.text else "length")
    assert output.outputs[1].stop_reason == stop


def test_a_choice_s_error_is_its_own(llm: LLM) -> None:
    bad, good = llm.generate([prompt(core.NON_FINITE), prompt(1)], SamplingParams(n=2, max_tokens=3))
    assert [answer.finish_reason for answer in bad.outputs] == ["error", "error"]
    assert [len(answer.token_ids) for answer in good.outputs] == [3, 3]


def test_settings_are_checked_by_name() -> None:
    for wrong in ({"max_num_sequences": 3}, {"kv_cache_memory": 0}, {"dtype": "int3"}):
        with pytest.raises(RejectedError, match=next(iter(wrong))):
            LLM("fake", **wrong)
    with LLM("fake", kv_cache_memory=4 * 64, max_model_len=60) as small:
        assert small.max_model_len == 60
        assert small.model_info.vocab_size == core.VOCAB_SIZE


def test_the_progress_bar_is_on_by_default(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate([prompt(1)] * 3, GREEDY)
    assert "3/3" in capsys.readouterr().err
    llm.chat([{"role": "user", "content": "hi"}], GREEDY, functools.partial(tqdm, desc="mine"))
    assert "1/1" in capsys.readouterr().err
    llm.generate(prompt(1), GREEDY, use_tqdm=False)
    [*llm.generate(prompt(1), GREEDY, stream=True)]
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_close_is_idempotent_and_final() -> None:
    with LLM("fake") as made:
        pass
    made.close()
    for call in (
        lambda: made.generate(prompt(1), GREEDY),
        lambda: made.chat([{"role": "user", "content": "x"}]),
    ):
        with pytest.raises(RejectedError, match="closed"):
            call()


def test_a_dropped_llm_frees_its_engine() -> None:
    before = set(threading.enumerate())
    made = LLM("fake")
    threads = set(threading.enumerate()) - before
    assert {thread.name for thread in threads} == {"llaisys-engine", "llaisys-watchdog"}
    del made
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_the_package_is_lazy_and_lists_its_names() -> None:
    script = "import sys, llaisys; print('numpy' in sys.modules, llaisys.SamplingParams.__module__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "llaisys.sampling_params"]
    assert {"LLM", "AsyncLLM", "SamplingParams"} <= set(dir(llaisys))
    with pytest.raises(AttributeError, match="Llm"):
        llaisys.Llm  # noqa: B018 -- the access is tested


def n_cached(llm: LLM, ids: list[int], **more: Any) -> int:
    (output,) = llm.generate(prompt(*ids), GREEDY, **more)
    return output.num_cached_tokens


def test_a_session_keeps_what_others_evict() -> None:
    """Its next turn computes only the new tokens; without a session all tokens are evicted."""
    chat = [*range(1, 31)]
    for session, want in (("chat", 39), ("", 0)):
        with LLM("fake", num_kv_cells=128, max_model_len=64, max_num_seqs=1) as llm:
            (first,) = llm.generate(prompt(*chat), GREEDY, session_id=session)
            for i in range(4):
                llm.generate(prompt(*[100 + i] * 50), GREEDY)
            turn = [*chat, *first.outputs[0].token_ids, 7]
            assert n_cached(llm, turn, session_id=session) == want


def test_each_prompt_has_its_own_session(llm: LLM) -> None:
    prompts = [prompt(1, 2, 3), prompt(4, 5, 6), prompt(7, 8, 9)]
    llm.generate(prompts, GREEDY, session_id=["a", "", "b"])
    stats = llm._engine.client.stats()
    assert (stats.num_sessions, stats.kv_cells_session) == (2, 2 * 12)
    for wrong in ("a", ["a", "b"], ["a", "a", ""], ["a", "../b", ""]):
        with pytest.raises(RejectedError) as caught:
            llm.generate(prompts, GREEDY, session_id=wrong)
        assert caught.value.param == "session_id"
    llm.chat([[{"role": "user", "content": "hi"}]], GREEDY, session_id="c")
    assert llm._engine.client.stats().num_sessions == 3


class Gate:
    """Block the engine in each decode until `opened` is set. `reached` is set inside a decode.

    For engines without speculation, whose start would wait in the decodes that it measures.
    """

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made, decode = Gate(), core.Context.decode

    def wait_then_decode(context: core.Context, *arrays: Any, **masks: Any) -> Any:
        made.reached.set()
        made.opened.wait(30)
        return decode(context, *arrays, **masks)

    monkeypatch.setattr(core.Context, "decode", wait_then_decode)
    return made


def test_priorities_order_waiting_requests(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request runs at a time; of those that wait, the lowest number is next."""
    prompts = [prompt(i) for i in range(4)]
    with LLM("fake", num_kv_cells=1024, max_num_seqs=1, speculative_config=None) as llm:
        submit = llm._engine.client.submit

        def open_at_the_last(request: Any) -> None:
            submit(request)
            if request.request_id == "3":
                gate.opened.set()

        monkeypatch.setattr(llm._engine.client, "submit", open_at_the_last)
        deltas = llm.generate(prompts, GREEDY, priority=[0, 3, 2, -1], stream=True)
        ends = [int(delta.request_id) for delta in deltas if delta.finished]
        assert ends.index(3) < ends.index(2) < ends.index(1)
        assert tokens(llm.generate(prompts, GREEDY, priority=5)) == [core.answer([i], 10) for i in range(4)]
        assert len(llm.chat([HELLO, HELLO], GREEDY, priority=[1, 2])) == 2
        for wrong in ([1], [0, 0, 0, True], 2**31, [0, 0, 0, "high"]):
            with pytest.raises(RejectedError) as caught:
                llm.generate(prompts, GREEDY, priority=wrong)
            assert caught.value.param == "priority"


HELLO = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]


def test_a_chat_template_given_as_text(llm: LLM) -> None:
    shown = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}{{ messages[0].content }}{{ mood }}"
    (output,) = llm.chat(HELLO, GREEDY, chat_template=shown, tools=TOOLS, chat_template_kwargs={"mood": "!"})
    assert output.prompt == "now;hi!"
    assert llm.chat(HELLO, GREEDY, chat_template_content_format="string")[0].prompt == "user:hi;>"


@pytest.mark.parametrize(
    ("template", "param", "says"),
    [
        ("chatml.jinja", "chat_template", "not its path"),
        ("{% for %}", "chat_template", "line 1"),
        ("{" + "x" * (1 << 20), "chat_template", "at most 1048576"),
        (b"{{ x }}", "chat_template", "bytes"),
        ("{{ raise_exception('no tools') }}", "messages", "no tools"),
        ("{{ messages.__class__.__mro__ }}", "messages", "unsafe"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "messages",
            "steps",
        ),
        ("{% for i in range(99999) %}xxxxxxxxxx{% endfor %}", "messages", "characters"),
    ],
)
def test_an_invalid_chat_template_is_rejected(llm: LLM, template: Any, param: str, says: str) -> None:
    """A template given as text has the sandbox and the limits of the model's."""
    with pytest.raises(RejectedError, match=says) as caught:
        llm.chat(HELLO, GREEDY, chat_template=template)
    assert caught.value.param == param


def test_arguments_of_vllm_without_a_meaning_here(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match="tokenization_kwargs"):
        llm.generate("hi", GREEDY, tokenization_kwargs={"a": 1})  # type: ignore[call-overload]
    for name in ("tokenization_kwargs", "mm_processor_kwargs"):
        with pytest.raises(UnsupportedError, match=name):
            llm.chat(HELLO, GREEDY, **{name: {"a": 1}})
    with pytest.raises(UnsupportedError, match="chat_template_content_format is 'openai'"):
        llm.chat(HELLO, GREEDY, chat_template_content_format="openai")


def test_reset_prefix_cache_keeps_sessions() -> None:
    with LLM("fake", num_kv_cells=1024) as llm:
        first, second = [*range(1, 21)], [*range(101, 121)]
        llm.generate(prompt(*first), GREEDY)
        (kept,) = llm.generate(prompt(*second), GREEDY, session_id="chat")
        assert n_cached(llm, first) == 19
        assert llm.reset_prefix_cache()
        assert n_cached(llm, first) == 0
        assert n_cached(llm, [*second, *kept.outputs[0].token_ids, 7]) == 29
        for name in ("reset_running_requests", "reset_connector"):
            with pytest.raises(UnsupportedError, match=name):
                llm.reset_prefix_cache(**{name: True})


def test_reset_prefix_cache_does_nothing_while_requests_run(gate: Gate) -> None:
    params = SamplingParams(temperature=0, max_tokens=100)
    with LLM("fake", num_kv_cells=1024, speculative_config=None) as llm, ThreadPoolExecutor(1) as pool:
        gate.opened.set()
        llm.generate(prompt(*range(1, 21)), GREEDY)
        gate.opened.clear()
        gate.reached.clear()
        call = pool.submit(llm.generate, prompt(1, 2, 3), params)
        assert gate.reached.wait(30)
        is_reset = llm._engine.client.reset_prefix_cache()
        gate.opened.set()
        assert is_reset.result(30) is False
        assert len(call.result(30)[0].outputs[0].token_ids) == 100
        assert n_cached(llm, [*range(1, 21)]) == 19
        assert llm.reset_prefix_cache() is True
        assert n_cached(llm, [*range(1, 21)]) == 0


def test_every_name_of_the_package_can_be_imported() -> None:
    public = {name for name in dir(llaisys.errors) if name.endswith("Error") and name != "TimeoutError"}
    assert public <= set(llaisys.__all__), "every error class is exported"
    for name in llaisys.__all__:
        assert getattr(llaisys, name).__name__ == name
    assert {"StructuredOutputsParams", "RequestOutputKind", "PoolingParams"} <= set(llaisys.__all__)
