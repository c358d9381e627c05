"""The adapters of an engine: loading, use by requests, unloading, and the salts of their prefixes."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from llaisys.engine.lora import LoraManager, hash_in, salted, with_salt
from llaisys.engine.messages import LoadLora, UnloadLora
from llaisys.engine.request import BrokenInvariant, EngineRequest
from llaisys.engine.sessions.file import Adapter
from llaisys.errors import ExhaustedError, RejectedError
from llaisys.lora_request import LoRARequest
from llaisys.sampling_params import SamplingParams


class Loader:
    """Slots of a core. Paths that begin with `bad` are damaged."""

    def __init__(self, n_slots: int) -> None:
        self.slots: list[str | None] = [None] * n_slots
        self.n_loads = 0

    def load_lora(self, path: str) -> tuple[int, str]:
        if path.startswith("bad"):
            raise RejectedError("the adapter is damaged")
        slot = self.slots.index(None)
        self.slots[slot] = path
        self.n_loads += 1
        return slot, f"{hash(path) & (2**64 - 1):032x}"

    def unload_lora(self, slot: int) -> None:
        assert self.slots[slot] is not None
        self.slots[slot] = None


def lora(number: int, path: str = "") -> LoRARequest:
    return LoRARequest(f"name{number}", number, path or f"path{number}")


def request(adapter: LoRARequest | None, n: int = 1, salt: str = "") -> EngineRequest:
    return EngineRequest(
        request_id="r",
        prompt_token_ids=[1],
        params=SamplingParams(n=n),
        eos_token_ids=(),
        arrival_s=0.0,
        deadline_s=1.0,
        cache_salt=salt,
        lora=adapter,
    )


def test_an_adapter_is_unloaded_when_its_last_choice_ends() -> None:
    loader = Loader(2)
    manager = LoraManager(loader, 2)
    manager.load(lora(1))
    used = manager.acquire(request(lora(1), n=3))
    assert loader.n_loads == 1
    manager.unload(1)
    manager.unload(7)  # never loaded
    for n_left in (2, 1):
        manager.release(used)
        manager.check(n_left)
        assert loader.slots[0] == "path1"
    manager.release(used)
    assert loader.slots == [None, None]
    with pytest.raises(BrokenInvariant):
        manager.check(1)


def test_a_slot_goes_from_the_least_recently_used_idle_adapter_to_the_next() -> None:
    loader = Loader(2)
    manager = LoraManager(loader, 2)
    first = manager.acquire(request(lora(1)))
    manager.load(lora(2))
    manager.load(lora(3))
    assert loader.slots == ["path1", "path3"]
    second = manager.acquire(request(lora(3)))
    with pytest.raises(ExhaustedError, match="open requests use 2 LoRA adapters"):
        manager.acquire(request(lora(4)))
    manager.release(first)
    assert manager.acquire(request(lora(4))) is not None
    assert loader.slots == ["path4", "path3"]
    manager.release(second)
    assert manager.acquire(request(None)) is None


def test_calls_reply_with_the_error() -> None:
    manager = LoraManager(Loader(1), 1)
    assert manager.handle(LoadLora(5, lora(1))).error is None
    reply = manager.handle(LoadLora(6, lora(2, "bad")))
    assert (reply.call_id, str(reply.error)) == (6, "the adapter is damaged")
    assert manager.handle(UnloadLora(7, 1)).error is None


def test_salts_of_adapters_and_of_requests_never_meet() -> None:
    hashes = ["", "0" * 32, f"{1:032x}"]
    salts = ["", "a", "\0", "\0lora:", f"\0lora:{0:032x}", f"\0lora:{0:032x}a", "\0\0lora:x"]
    made = {salted(salt, digest): (salt, digest) for salt in salts for digest in hashes}
    assert len(made) == len(hashes) * len(salts)
    assert all(hash_in(salt) == digest for salt, (_, digest) in made.items())
    plain = request(None, salt="x")
    assert with_salt(plain, None) is plain


def test_a_saved_session_needs_an_adapter_with_the_same_contents() -> None:
    manager = LoraManager(Loader(2), 2)
    loaded = manager.load(lora(1))
    salt = salted("s", loaded.hash)
    adapter = manager.adapter_of(salt)
    assert adapter == Adapter(loaded.hash, "name1")
    assert manager.salt_of("s", adapter) == salt
    assert manager.salt_of("s", Adapter()) == "s"
    manager.unload(1)
    manager.load(replace(lora(2), lora_name="name1"))  # other contents
    with pytest.raises(RejectedError, match=r"'name1'.*load the adapter first"):
        manager.salt_of("s", adapter)


@pytest.mark.parametrize("seed", range(20))
def test_slots_and_counts_agree_after_any_calls(seed: int) -> None:
    rng = random.Random(seed)
    loader = Loader(3)
    manager = LoraManager(loader, 3)
    used = []
    for _ in range(300):
        number = rng.randint(1, 6)
        match rng.randint(0, 3):
            case 0:
                manager.unload(number)
            case 1 if used:
                manager.release(used.pop(rng.randrange(len(used))))
            case _:
                try:
                    used.append(manager.acquire(request(lora(number))))
                except ExhaustedError:
                    assert len({each.slot for each in used if each is not None}) == 3
        manager.check(len(used))
        for each in used:
            assert each is not None
            assert loader.slots[each.slot] == each.request.lora_path
