"""Authenticated messages between a cluster's processes: framing, keys, sockets, shared memory."""

__all__: list[str] = []
