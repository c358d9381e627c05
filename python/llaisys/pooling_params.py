"""PoolingParams: how the prompts of `LLM.encode`, `embed` and `score` become vectors."""

from __future__ import annotations

from dataclasses import dataclass

from llaisys.errors import RejectedError, UnsupportedError
from llaisys.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Parameters of one pooling request. Names and meanings are vLLM's.

    - `truncate_prompt_tokens`: number of tokens to use from the end of the prompt; -1: as many as
      leave space for one more.
    - `dimensions`: only the model's own number, because models do not state whether their vectors can be
      truncated.
    - `normalize`: the vector gets L2 norm 1. None: if the model says so; most do.
    - `task`: only "embed".

    Raises RejectedError or UnsupportedError naming the field.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    task: str | None = None

    def __post_init__(self) -> None:
        self.sampling_params()
        if self.normalize is not None and not isinstance(self.normalize, bool):
            raise RejectedError(f"normalize is {self.normalize!r}, expected True or False", param="normalize")
        check_task(self.task)

    def check_dimensions(self, d_model: int) -> None:
        """Raise UnsupportedError unless the dimensions are those of the model."""
        if self.dimensions not in (None, d_model):
            raise UnsupportedError(
                f"dimensions is {self.dimensions}, supported is only {d_model}, the size of the model",
                param="dimensions",
            )

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of the engine's request."""
        return SamplingParams(
            truncate_prompt_tokens=self.truncate_prompt_tokens, max_tokens=None, detokenize=False
        )


def check_task(task: str | None) -> None:
    """Raise RejectedError or UnsupportedError for a pooling task other than embed, or None."""
    if task not in (None, "embed"):
        if not isinstance(task, str):
            raise RejectedError(f"the pooling task is {task!r}, expected 'embed'", param="pooling_task")
        raise UnsupportedError(
            f"the pooling task {task!r} is not supported: use 'embed'", param="pooling_task"
        )
