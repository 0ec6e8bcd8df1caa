"""Ours: one parameter server, which tells its address and serves until stdin ends."""

from __future__ import annotations

import sys

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import stratagem.keras  # by whose import the optimizers that arrive are those of Keras on JAX
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.server.server import ParameterServer

__all__ = ["main"]

assert sg
assert stratagem.keras


def main() -> None:
    """Serves with the keys that come as the first line of stdin."""
    keys = ClusterKeys(bytes.fromhex(sys.stdin.readline()))
    with ParameterServer(keys) as server:
        print(server.address, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
