"""Every array argument of the compiled core: any layout except C order is rejected, never misread."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from golden import FOLDER
from llaisys import _core
from llaisys.errors import RejectedError
from runner import LOGITS, Runner

Array = NDArray[Any]
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
WEIGHT_SHAPE = (64, 64)  # square, so the shape of its transpose is accepted too
N_WORDS = 19  # words of a mask for the 600 tokens of the golden model


@dataclass
class Argument:
    """One array argument: a valid value, and a call with that argument."""

    name: str
    value: Array
    call: Callable[[Array], Any]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with Runner(FOLDER) as made:
        yield made


def arguments(runner: Runner) -> list[Argument]:
    """Return all array arguments. Their calls are independent of each other."""
    context, seq = runner.context, runner.context.seq_acquire()
    rows: dict[str, Any] = {
        "tokens": np.array([5, 6, 7], np.int32),
        "positions": np.arange(3, dtype=np.int32),
        "n_seq_id": np.ones(3, np.int32),
        "seq_ids": np.full(3, seq, np.int64),
        "wants_output": np.full(3, LOGITS, np.uint8),
        "stream": np.zeros(3, np.uint32),
    }
    masks = (np.arange(3, dtype=np.int32), np.full((3, N_WORDS), 0xFFFF_FFFF, np.uint32))

    def decode(**changed: Any) -> None:
        context.decode(**{**rows, "logits_mask": masks, **changed})
        context.kv_seq_rm(seq, 0, -1)

    def row(name: str) -> Argument:
        return Argument(name, rows[name], lambda value: decode(**{name: value}))

    ids, spec = np.arange(4, dtype=np.int32), _core.SamplerSpec()
    kv = _core.KvCache(n_cells=8, n_seq_max=1)
    kv_seq = kv.seq_acquire()
    kv_arrays: dict[str, Any] = {
        "positions": np.arange(3, dtype=np.int32),
        "n_seq_id": np.ones(3, np.int32),
        "seq_ids": np.full(3, kv_seq, np.int64),
    }

    def extend(**changed: Any) -> None:
        kv.extend(**{**kv_arrays, **changed})
        kv.kv_seq_rm(kv_seq, 0, -1)

    def kv_argument(name: str) -> Argument:
        return Argument(name, kv_arrays[name], lambda value: extend(**{name: value}))

    runner.extend(seq, [1, 2, 3], 0)
    context.kv_node_cache(1, seq, 0, 3)
    cells = context.kv_node_export(1, 0, 3)
    context.kv_node_trim(1, 0)
    context.kv_seq_rm(seq, 0, -1)

    def import_cells(data: Array) -> None:
        context.kv_node_import(2, 0, 0, data)
        context.kv_node_trim(2, 0)

    weight = np.random.default_rng(7).standard_normal(WEIGHT_SHAPE, np.float32)
    return [
        *(row(name) for name in rows),
        Argument("logits_mask[0]", masks[0], lambda value: decode(logits_mask=(value, masks[1]))),
        Argument("logits_mask[1]", masks[1], lambda value: decode(logits_mask=(masks[0], value))),
        Argument("prompt_ids", ids, lambda value: context.set_sampler(seq, spec, value, ids)),
        Argument("output_ids", ids, lambda value: context.set_sampler(seq, spec, ids, value)),
        Argument("data", cells, import_cells),
        Argument("values", weight, lambda value: context.replace_weight(WEIGHT, value)),
        *(kv_argument(name) for name in kv_arrays),
    ]


def layouts(value: Array) -> dict[str, Array]:
    """Return equal values in every non-C-order layout that exists for this shape and dtype."""
    spread = np.repeat(value, 2, axis=0)
    shifted = np.frombuffer(b"\0" + value.tobytes(), value.dtype, offset=1).reshape(value.shape)
    packed = np.zeros(value.shape, np.dtype([("before", "u1"), ("value", value.dtype)]))
    packed["value"] = value
    made = {
        "Fortran order": np.asfortranarray(value),
        "transposed view": np.ascontiguousarray(value.T).T,
        "negative strides": np.ascontiguousarray(value[::-1])[::-1],
        "a step": spread[::2],
        "zero strides": np.broadcast_to(value[:1], value.shape),
        "misaligned": shifted,
        "field of a structure": packed["value"],
    }
    flags = {name: (array.flags.c_contiguous, array.flags.aligned) for name, array in made.items()}
    return {name: array for name, array in made.items() if flags[name] != (True, True)}


def dtypes(value: Array) -> dict[str, Array]:
    """Return equal values in other dtypes."""
    made = {
        "wider": value.astype(np.float64),
        "a plain list": value.tolist(),
        "other sign": value.astype({"i": "u", "u": "i", "f": "i"}[value.dtype.kind] + str(value.itemsize)),
        "swapped": value.astype(value.dtype.newbyteorder()),
        "objects": value.astype(object),
        "two dimensions": value[None],
    }
    left_out = {"swapped": value.itemsize == 1, "two dimensions": value.ndim > 1}
    return {name: array for name, array in made.items() if not left_out.get(name)}


def test_layouts_covers_every_layout() -> None:
    """The tests below loop over these layouts."""
    matrix, line, octets = np.ones((3, 4), np.float32), np.ones(3, np.int64), np.ones(3, np.uint8)
    assert len(layouts(matrix)) == 7
    assert sorted(layouts(line)) == [
        "a step",
        "field of a structure",
        "misaligned",
        "negative strides",
        "zero strides",
    ]
    assert sorted(layouts(octets)) == ["a step", "field of a structure", "negative strides", "zero strides"]


def test_another_layout_is_rejected_with_shape_and_strides(runner: Runner) -> None:
    for argument in arguments(runner):
        argument.call(argument.value)
        before = runner.context.digest()
        for name, array in layouts(argument.value).items():
            with pytest.raises(RejectedError) as rejected:
                argument.call(array)
            message = str(rejected.value)
            assert message.startswith(f"{argument.name} is not "), (name, message)
            assert f"shape {list(array.shape)}, strides {list(array.strides)} bytes" in message, (
                name,
                message,
            )
            assert ("not aligned" in message) is not array.flags.aligned, (name, message)
        assert runner.context.digest() == before
        argument.call(np.array(layouts(argument.value)["a step"], order="C"))  # as the message suggests


def test_another_dtype_is_a_type_error(runner: Runner) -> None:
    for argument in arguments(runner):
        name = argument.name.partition("[")[0]
        for what, array in dtypes(argument.value).items():
            with pytest.raises(TypeError, match=r"mismatch|not an instance of") as refused:
                argument.call(array)
            if sys.version_info >= (3, 11):  # errors have notes, and pyo3 names the argument in one
                assert refused.value.__notes__ == [f"while processing '{name}'"], what


def test_read_only_arrays_are_accepted(runner: Runner) -> None:
    for argument in arguments(runner):
        value = argument.value.copy()
        value.setflags(write=False)
        argument.call(value)
        np.testing.assert_array_equal(value, argument.value)


def test_strides_of_arrays_with_at_most_one_element_do_not_matter(runner: Runner) -> None:
    """Strides have no meaning for such arrays, and NumPy may report any."""
    context = runner.context
    seq, spec = context.seq_acquire(), _core.SamplerSpec()
    one = np.arange(6, dtype=np.int32)[4::7]
    context.set_sampler(seq, spec, np.empty(0, np.int32)[::-1], one)
    context.seq_release(seq)


def test_a_rejected_weight_changes_nothing() -> None:
    """A Fortran-ordered array has the right shape, with its elements in another order."""
    value = np.random.default_rng(8).standard_normal(WEIGHT_SHAPE, np.float32)
    with Runner(FOLDER) as runner:
        before = runner.forward([1, 2, 3])[0]
        with pytest.raises(RejectedError, match="values is not in C order"):
            runner.context.replace_weight(WEIGHT, np.asfortranarray(value))
        np.testing.assert_array_equal(runner.forward([1, 2, 3])[0], before)
        runner.context.replace_weight(WEIGHT, np.array(np.asfortranarray(value), order="C"))
        after = runner.forward([1, 2, 3])[0]
        assert not np.array_equal(after, before)
