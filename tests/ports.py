"""Ports for programs that must be told a number."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

# No other program is given one of these between the choice and its use: Linux takes the ports of outgoing
# connections and of listeners on port 0 from 32768 on (`ip_local_port_range`), Ray those of its workers from
# 10002 to 19999.
PORTS = range(20_000, 32_768)


def free_port() -> int:
    """Return a port that nothing uses, at random, because tests run side by side."""
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as made, suppress(OSError):
            made.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port among 100 of {PORTS}")
