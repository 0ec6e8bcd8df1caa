"""Freed memory, which a process keeps or gives back."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

from stratagem import environment as host_memory
from tests.fresh_process import run_fresh

PROGRAM = """
import resource
import stratagem
import jax
import jax.numpy as jnp

step = jax.jit(lambda x: x + 1)
x = jnp.zeros(2**24)
for place in range(36):
    if place == 26:
        begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    x = step(x).block_until_ready()
print("page faults:", resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
"""

HAS_MALLOPT = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")


def page_faults(**variables: str) -> int:
    """Page faults of ten steps, each with a new result of 64 MiB."""
    (line,) = run_fresh(PROGRAM, JAX_PLATFORMS="cpu", **variables)
    return int(line.split("page faults:")[1])


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MALLOPT, reason="no mallopt")
def test_steps_find_their_memory_as_they_left_it() -> None:
    by_default = page_faults(STRATAGEM_KEEP_FREED_MEMORY="0")
    if by_default < 10_000:
        pytest.skip("this system gives memory without faults, or in large pages")
    assert page_faults() < by_default / 10


@pytest.mark.skipif(not HAS_MALLOPT, reason="no mallopt")
@pytest.mark.parametrize("after", ["", "host_memory.release_freed_memory();"])
def test_large_pages_are_requested_for_a_quarter_of_the_memory(after: str) -> None:
    lines = run_fresh(
        f"from stratagem import environment as host_memory; {after} "
        "print(open('/proc/self/smaps').read())",
        JAX_PLATFORMS="cpu",
    )
    is_large, sizes = [], []
    for line in lines:
        if line.startswith("Size:"):
            sizes.append(int(line.split()[1]) * 1024)
        elif line.startswith("VmFlags:"):
            is_large.append("hg" in line.split())
    requested = sum(size for size, large in zip(sizes, is_large, strict=True) if large)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert requested == pytest.approx(memory / 4, rel=0.01)


@pytest.mark.skipif(not HAS_MALLOPT, reason="no mallopt")
@pytest.mark.parametrize(("text", "is_kept"), [("1", "True"), ("0", "False")])
def test_setting_is_read_when_the_library_is_imported(text: str, is_kept: str) -> None:
    program = "import stratagem; from stratagem import environment; print(environment._is_kept)"
    assert run_fresh(program, JAX_PLATFORMS="cpu", STRATAGEM_KEEP_FREED_MEMORY=text) == [is_kept]


def test_process_with_little_address_space_starts() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)); "
    run_fresh(f"{limit}import stratagem", JAX_PLATFORMS="cpu")


RELEASED = """
import stratagem
import numpy as np
from stratagem.environment import release_freed_memory
from stratagem.observe.run_events.process_writer import resident_bytes

begun = resident_bytes()
arrays = [np.ones(2**22) for _ in range(8)]
last = np.ones(2**22)  # at the end of the heap, so that what is before it stays with the process
del arrays
kept = resident_bytes() - begun
release_freed_memory()
print("kept:", kept, resident_bytes() - begun)
"""


@pytest.mark.skipif(not HAS_MALLOPT, reason="no mallopt")
def test_freed_memory_is_released() -> None:
    (line,) = run_fresh(RELEASED, JAX_PLATFORMS="cpu")
    kept_bytes, released_bytes = map(int, line.split("kept:")[1].split())
    assert kept_bytes > 8 * 2**25
    assert released_bytes < 2 * 2**25


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """Arguments of malloc's settings, which are not changed."""
    calls: list[tuple[int, int]] = []

    class Library:
        def __init__(self, name: None) -> None:
            pass

        def mallopt(self, parameter: int, value: int) -> int:
            calls.append((parameter, value))
            return int(parameter == -8)  # the first; large pages are requested if all succeed

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX"):
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
    assert not host_memory.keep_freed_memory()  # none of its calls has an effect here
    assert bool(calls) is keeps


@pytest.mark.parametrize(
    ("name", "value"),
    [
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
