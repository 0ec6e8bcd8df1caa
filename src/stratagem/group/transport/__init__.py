"""Authenticated messages between a cluster's processes: framing, keys, sockets, shared memory."""
