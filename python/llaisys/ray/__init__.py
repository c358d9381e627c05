"""llaisys.ray: replicas of a server on Ray Serve (`serve run llaisys.ray:app model=smollm2`).

A gateway reads each request and passes it to a replica, which is a whole server without a socket. Needs the
extra `ray`.
"""

from __future__ import annotations

from llaisys.ray.builder import app

__all__ = ["app"]
