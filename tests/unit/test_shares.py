"""Shares of a bound: the part that each of several clients can always use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llaisys.shares import Shares


class Slots:
    """The slow model: each unit is a reserved or a common slot; a client uses its reserved slots first."""

    def __init__(self, shares: Shares) -> None:
        self.bound = shares.bound
        self.own = {f"{i}": shares.reserved for i in range(shares.n_clients)}
        self.common = shares.common
        self.taken: list[tuple[str, str]] = []  # (owner of the slot, client that uses it)

    def take(self, client: str) -> bool:
        if len(self.taken) == self.bound:
            return False
        n_own = self.taken.count((client, client))
        n_common = sum(slot == "common" for slot, _ in self.taken)
        if n_own < self.own[client]:
            self.taken.append((client, client))
        elif n_common < self.common:
            self.taken.append(("common", client))
        else:
            return False
        return True

    def release(self, client: str) -> None:
        """Release a common slot first, so that the rest moves to the reserved slots."""
        mine = [each for each in self.taken if each[1] == client]
        if mine:
            self.taken.remove(max(mine, key=lambda each: each[0] == "common"))

    def used(self) -> dict[str, int]:
        counted: dict[str, int] = {}
        for _, client in self.taken:
            counted[client] = counted.get(client, 0) + 1
        return counted


@given(
    st.integers(0, 40), st.integers(2, 6), st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=99)
)
def test_shares_match_a_slow_model(bound: int, n_clients: int, acts: list[tuple[int, bool]]) -> None:
    shares = Shares(bound, n_clients)
    slots = Slots(shares)
    for number, takes in acts:
        client = f"{number % n_clients}"
        if not takes:
            slots.release(client)
            continue
        used = slots.used()
        allowed = shares.allows(used, client)
        assert allowed == slots.take(client)
        if used.get(client, 0) < shares.reserved and n_clients * shares.reserved + shares.common <= bound:
            assert allowed, "a client did not get a unit that is reserved for it"


@given(st.integers(1, 500), st.integers(2, 200))
def test_reserved_and_common_units_add_up_to_the_bound(bound: int, n_clients: int) -> None:
    shares = Shares(bound, n_clients)
    assert 1 <= shares.reserved <= bound
    assert shares.reserved >= bound // (2 * n_clients)
    assert shares.maximum >= bound // 2, "a lone client must be able to use half of the bound"
    if 2 * n_clients <= bound:
        assert n_clients * shares.reserved + shares.common == bound
        assert shares.maximum < bound


def test_several_units_are_granted_at_once() -> None:
    shares = Shares(64, 2)
    assert (shares.reserved, shares.common, shares.maximum) == (16, 32, 48)
    assert shares.allows({}, "a", 48)
    assert not shares.allows({}, "a", 49)
    assert shares.allows({"a": 48}, "b", 16)
    assert not shares.allows({"a": 48}, "b", 17)
    assert not shares.allows({"a": 48}, "a", 1)


def test_without_several_clients_all_units_are_common() -> None:
    shares = Shares(10)
    assert shares.maximum == 10
    assert shares.allows({"a": 4}, "b", 6)
    assert not shares.allows({"a": 4}, "b", 7)
