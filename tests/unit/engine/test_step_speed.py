"""The speed of steps is a moving average of what each step measures."""

from __future__ import annotations

import pytest

from llaisys.engine.step_speed import StepSpeed


def test_step_speed_is_a_moving_average() -> None:
    speed = StepSpeed()
    for _ in range(40):
        speed = speed.observe(0.01, 0)
        speed = speed.observe(0.11, 100)
    assert speed.step_s == pytest.approx(0.01)
    assert speed.prefill_token_s == pytest.approx(0.001)
    once = speed.observe(10.0, 100)
    assert once.prefill_token_s == pytest.approx(0.001 + 0.2 * (0.0999 - 0.001))


def test_step_speed_keeps_values_that_a_step_did_not_measure() -> None:
    speed = StepSpeed(0.1, 0.01).observe(0.2, 0)
    assert speed.step_s == pytest.approx(0.1 + 0.2 * 0.1)
    assert speed.prefill_token_s == 0.01
    assert StepSpeed().observe(0.5, 5) == StepSpeed(None, 0.1, 5)


def test_the_last_token_of_a_cached_prompt_hardly_changes_the_speed_of_prompts() -> None:
    speed = StepSpeed().observe(2.0, 500)
    for _ in range(3):
        speed = speed.observe(0.02, 1)
    assert speed.prefill_token_s == pytest.approx(0.004, rel=0.05)
