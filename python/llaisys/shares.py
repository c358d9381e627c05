"""How a bounded resource is divided among clients, where what one holds cannot be taken back. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """`bound` units (queue places, bytes, sessions) among `n_clients` configured clients.

    Half of the units are reserved, in equal parts, at least one for each client; the other half goes to
    whoever comes first. So a client that is alone gets more than half, and each client always finds its
    reserved part free. With fewer units than clients need for that, the reserved half is first come first
    served among those that hold nothing. With one client there are no parts: the bound alone counts.
    """

    bound: int
    n_clients: int = 1

    @property
    def reserved(self) -> int:
        """Units that each client can count on."""
        if self.n_clients < 2:
            return self.bound
        return min(self.bound, max(1, self.bound // (2 * self.n_clients)))

    @property
    def common(self) -> int:
        """Units for whoever comes first, beyond the reserved ones."""
        if self.n_clients < 2:
            return 0
        return max(self.bound - self.n_clients * self.reserved, (self.bound - 1) // 2)

    @property
    def most(self) -> int:
        """Units that one client can hold while the others hold nothing."""
        return min(self.bound, self.reserved + self.common)

    def allows(self, held: Mapping[str, int], client_id: str, n_more: int = 1) -> bool:
        """True if a client may hold `n_more` units. `held`: units of each client that holds any."""
        if sum(held.values()) + n_more > self.bound:
            return False
        mine = held.get(client_id, 0) + n_more
        if self.n_clients < 2 or mine <= self.reserved:
            return True
        others = sum(max(0, n - self.reserved) for client, n in held.items() if client != client_id)
        return others + mine - self.reserved <= self.common
