"""Patches of libraries while a backend starts, and their removal."""

from __future__ import annotations

import os
import threading
from typing import Any

import jaxlib._jax as library
import pytest
from jax._src import compilation_cache, compiler

from stratagem.devices.private import enable_compilation_cache, gloo_bound_to


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has scheduling policies")
def test_gloo_gets_an_address_and_its_thread_takes_no_core_from_others(monkeypatch) -> None:
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> None:
        policy = lambda: made.append((args, kwargs, os.sched_getscheduler(0)))  # noqa: E731
        thread = threading.Thread(target=policy)
        thread.start()
        thread.join()

    monkeypatch.setattr(library, "make_gloo_tcp_collectives", make)
    with gloo_bound_to("192.0.2.7"):
        library.make_gloo_tcp_collectives("client")
    assert made == [(("client",), {"hostname": "192.0.2.7"}, os.SCHED_BATCH)]
    assert library.make_gloo_tcp_collectives is make
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_backends_start_as_before_where_jax_has_no_such_function(monkeypatch) -> None:
    monkeypatch.delattr(library, "make_gloo_tcp_collectives")
    with gloo_bound_to("192.0.2.7"):
        assert not hasattr(library, "make_gloo_tcp_collectives")


def test_every_process_caches_programs_without_callbacks(
    monkeypatch,
) -> None:
    written: list[Any] = []
    monkeypatch.setattr(compiler, "_cache_write", lambda *args: written.append(("asked", *args)))
    monkeypatch.setattr(
        compilation_cache, "put_executable_and_time", lambda *args: written.append(args)
    )
    enable_compilation_cache()
    compiler._cache_write("key", 1.5, "module", "backend", "program", [])
    compiler._cache_write("key", 1.5, "module", "backend", "program")  # of newer releases
    asked = ("asked", "key", 1.5, "module", "backend", "program")
    put = ("key", "module", "program", "backend", 1)
    assert written == [(*asked, []), put, asked, put]
    written.clear()
    compiler._cache_write("key", 1.5, "module", "backend", "program", ["callback"])
    assert written == [(*asked, ["callback"])]


def test_full_disk_is_ignored(monkeypatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler, "_cache_write", lambda *_: None)
    monkeypatch.setattr(compilation_cache, "put_executable_and_time", fail)
    enable_compilation_cache()
    assert compiler._cache_write("key", 1.5, "module", "backend", "program", []) is None


def test_cache_stays_as_it_is_where_jax_has_no_such_function(monkeypatch) -> None:
    monkeypatch.delattr(compiler, "_cache_write")
    enable_compilation_cache()
    assert not hasattr(compiler, "_cache_write")
