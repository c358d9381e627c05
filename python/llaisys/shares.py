"""Shares: divides a bounded resource that cannot be reclaimed among clients. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shares:
    """Divides `bound` units (queue places, bytes, sessions) among `n_clients` configured clients.

    Half of the units are reserved in equal parts, at least one for each client; the other half is first come,
    first served. So a single active client gets more than half, and each client always finds its reserved
    part free. If there are too few units for that, the reserved half is first come, first served among
    clients that use nothing. A single client gets the whole bound.
    """

    bound: int
    n_clients: int = 1

    @property
    def reserved(self) -> int:
        """Return the units that are always available to each client."""
        if self.n_clients < 2:
            return self.bound
        return min(self.bound, max(1, self.bound // (2 * self.n_clients)))

    @property
    def common(self) -> int:
        """Return the units beyond the reserved ones, which are first come, first served."""
        if self.n_clients < 2:
            return 0
        return max(self.bound - self.n_clients * self.reserved, (self.bound - 1) // 2)

    @property
    def maximum(self) -> int:
        """Return the units that one client can use while the others use nothing."""
        return min(self.bound, self.reserved + self.common)

    def allows(self, used: Mapping[str, int], client_id: str, n_more: int = 1) -> bool:
        """Return True if a client may use `n_more` units. `used`: units of each client that uses any."""
        if sum(used.values()) + n_more > self.bound:
            return False
        mine = used.get(client_id, 0) + n_more
        if self.n_clients < 2 or mine <= self.reserved:
            return True
        others = sum(max(0, n - self.reserved) for client, n in used.items() if client != client_id)
        return others + mine - self.reserved <= self.common
