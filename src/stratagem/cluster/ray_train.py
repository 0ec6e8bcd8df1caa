"""Workers of Ray Train: their ranks from its context, address and secret of the run from rank 0."""

from __future__ import annotations

import functools
import importlib
import secrets
import socket
import sys
from typing import Any

from stratagem import environment
from stratagem.cluster.addresses import join_address
from stratagem.cluster.processes import Processes

RAY_TRAIN = "Ray Train"
_SECRET, _SECRET_FILE = "STRATAGEM_SECRET", "STRATAGEM_SECRET_FILE"


def ray_train() -> Processes | None:
    """Returns the workers of Ray Train; None outside its training functions.

    The first call with several workers waits for a call on each of them. They then share a new
    secret, unless the environment has one.
    """
    train: Any = sys.modules.get("ray.train")  # loaded in each of its workers
    if train is None:
        return None
    try:
        collective = importlib.import_module("ray.train.collective")
        context = train.get_context()
    # Another version of Ray Train, no worker, or a trial of Ray Tune.
    except (ImportError, RuntimeError, DeprecationWarning):
        return None
    num_processes, process_id = context.get_world_size(), context.get_world_rank()
    if num_processes == 1:
        return Processes(1, 0)
    # Ray has assigned the accelerators of the host to its workers, so their local ranks are unused.
    return Processes(num_processes, process_id, _meet(collective, is_leader=process_id == 0))


@functools.cache
def _meet(collective: Any, *, is_leader: bool) -> str:
    """Returns the address that rank 0 chose, and takes its secret."""
    offer = (_own_address(), secrets.token_hex(32)) if is_leader else None
    address, secret = collective.broadcast_from_rank_zero(offer)
    if environment.lookup(_SECRET) is None and environment.lookup(_SECRET_FILE) is None:
        environment.set_defaults({_SECRET: secret})
    return address


def _own_address() -> str:
    host = str(importlib.import_module("ray.util").get_node_ip_address())
    port = environment.lookup("JAX_COORDINATOR_PORT")
    if port is None:
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
    return join_address(host, port)
