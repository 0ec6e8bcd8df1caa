"""Ray processes that stop answering, here plain sockets, and a real cluster that is killed."""

from __future__ import annotations

import contextlib
import queue
import socket

import pytest

from stratagem.errors import UnavailableError
from stratagem.launch.remote.ray import ray_cluster as ray_watch
from stratagem.launch.remote.ray.ray_cluster import RayWatch
from tests.unit.launch.remote.ray.answering import answering, listening

_LIMIT_S = 60.0


@pytest.fixture
def losses(monkeypatch) -> queue.Queue[UnavailableError]:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "2")
    monkeypatch.setattr(ray_watch, "mark_ray_lost", lambda: None)
    return queue.Queue()


def test_process_that_ends_is_named_with_the_limit_and_what_to_do(losses) -> None:
    with answering() as gcs, contextlib.ExitStack() as stack:
        addresses = {"GCS": gcs, "raylet": stack.enter_context(answering())}
        with RayWatch(addresses, losses.put):
            stack.close()
            error = losses.get(timeout=_LIMIT_S)
    words = rf"Ray's raylet at {addresses['raylet']} has not answered for 1 s: refused"
    with pytest.raises(UnavailableError, match=rf"{words}(?s:.)*STRATAGEM_PEER_TIMEOUT_S(?s:.)*"):
        raise error
    assert "start the Ray cluster again" in str(error)
    assert losses.empty()  # told once


def test_process_that_was_stopped_is_named(losses) -> None:
    """The kernel still accepts connections for it."""
    with listening() as stopped, RayWatch({"raylet": stopped}, losses.put):
        error = losses.get(timeout=_LIMIT_S)
    assert f"Ray's raylet at {stopped} has not answered for 2 s: no answer within 1 s" in str(error)


@pytest.mark.slow
def test_process_that_is_restarted_in_time_is_not_lost(losses) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        watch = RayWatch({"GCS": f"127.0.0.1:{port}"}, losses.put)
    with socket.create_server(("127.0.0.1", port)) as second, watch:
        second.settimeout(_LIMIT_S)
        for _ in range(4):  # as many probes as the limit has seconds, and more
            second.accept()[0].close()
    assert losses.empty()
