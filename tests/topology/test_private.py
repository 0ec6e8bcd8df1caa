"""What is changed of libraries while a backend starts, and changed back."""

from __future__ import annotations

import os
import threading
from typing import Any

import jaxlib._jax as library
import pytest

from stratagem.topology.private import gloo_at


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has scheduling policies")
def test_gloo_gets_an_address_and_its_thread_takes_no_core_from_others(monkeypatch) -> None:
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> None:
        policy = lambda: made.append((args, kwargs, os.sched_getscheduler(0)))  # noqa: E731
        thread = threading.Thread(target=policy)
        thread.start()
        thread.join()

    monkeypatch.setattr(library, "make_gloo_tcp_collectives", make)
    with gloo_at("192.0.2.7"):
        library.make_gloo_tcp_collectives("client")
    assert made == [(("client",), {"hostname": "192.0.2.7"}, os.SCHED_BATCH)]
    assert library.make_gloo_tcp_collectives is make
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_backends_start_as_before_where_jax_has_no_such_function(monkeypatch) -> None:
    monkeypatch.delattr(library, "make_gloo_tcp_collectives")
    with gloo_at("192.0.2.7"):
        assert not hasattr(library, "make_gloo_tcp_collectives")
