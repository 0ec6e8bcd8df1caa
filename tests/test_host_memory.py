"""Freed memory, which a process keeps or gives back."""

from __future__ import annotations

import ctypes
import sys

import pytest

from stratagem import host_memory
from tests.fresh_process import run_fresh

PROGRAM = """
import resource
import stratagem
import jax
import jax.numpy as jnp

step = jax.jit(lambda x: x + 1)
x = jnp.zeros(2**24)
for place in range(60):
    if place == 50:
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = step(x).block_until_ready()
print("page faults:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
"""

HAS_MALLOPT = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")


def page_faults(**variables: str) -> int:
    """Page faults of ten steps, each with a new result of 64 MiB."""
    (line,) = run_fresh(PROGRAM, JAX_PLATFORMS="cpu", **variables)
    return int(line.split("page faults:")[1])


@pytest.mark.skipif(not HAS_MALLOPT, reason="no mallopt")
def test_steps_find_their_memory_as_they_left_it() -> None:
    by_default = page_faults(STRATAGEM_KEEP_FREED_MEMORY="0")
    if by_default < 10_000:
        pytest.skip("this system gives memory without faults, or in large pages")
    assert page_faults() < by_default / 10
    assert page_faults(MALLOC_TOP_PAD_="1000000") > by_default / 10  # the user's choice


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """Arguments of malloc's settings, which are not changed."""
    calls: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: None) -> None:
            pass

        def mallopt(self, parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return 1

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "STRATAGEM_KEEP_FREED_MEMORY"):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.mark.parametrize(
    ("platforms", "accelerators", "keeps"),
    [
        ("cpu", ["/dev/null"], True),
        ("cpu,cuda", [], True),
        ("cuda,cpu", [], False),
        (None, [], True),
        (None, ["/dev/null"], False),
    ],
)
def test_memory_is_kept_only_for_training_on_cpu(
    monkeypatch, calls, platforms, accelerators, keeps
) -> None:
    monkeypatch.setattr(host_memory, "_ACCELERATORS", accelerators)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if platforms is not None:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    assert host_memory.keep_freed_memory() is keeps
    assert bool(calls) is keeps


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("STRATAGEM_KEEP_FREED_MEMORY", "0"),
        ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"),
        ("MALLOC_ARENA_MAX", "2"),
    ],
)
def test_user_decides(monkeypatch, calls, name, value) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv(name, value)
    assert not host_memory.keep_freed_memory()
    assert calls == []


def test_nothing_happens_on_other_systems(monkeypatch, calls) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not host_memory.keep_freed_memory()
    assert calls == []
