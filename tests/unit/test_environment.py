"""What is read from the environment, and changes to it."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import sys
import types

import pytest

from stratagem import environment
from stratagem import environment as host_memory
from stratagem.environment import load
from stratagem.options import (
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    ReduceOp,
    RunOptions,
    VariableAggregation,
    VariableSynchronization,
)
from tests.fresh_process import run_fresh


def keras_on(backend: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(config=types.SimpleNamespace(backend=lambda: backend))


@pytest.mark.parametrize(("chosen", "found"), [(None, "jax"), ("", "jax"), ("torch", "torch")])
def test_jax_is_selected_where_no_backend_is_chosen(monkeypatch, chosen, found) -> None:
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", chosen or "")
    if chosen is None:
        monkeypatch.delenv("KERAS_BACKEND")
    environment.select_keras_backend()
    assert os.environ["KERAS_BACKEND"] == found


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_that_is_loaded_with_another_backend_is_refused(monkeypatch, backend) -> None:
    words = f"Keras runs on the '{backend}' backend(?s:.)*`import stratagem` before `import keras`"
    monkeypatch.setitem(sys.modules, "keras", keras_on(backend))
    with pytest.raises(ImportError, match=words):
        environment.select_keras_backend()
    with pytest.raises(ImportError, match=words):
        environment.require_jax_backend(backend)
    for fine in (keras_on("jax"), types.ModuleType("keras")):  # the last is being loaded
        monkeypatch.setitem(sys.modules, "keras", fine)
        environment.select_keras_backend()
    environment.require_jax_backend("jax")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, 1),
        ("--xla_dump_to=here", 1),
        ("--xla_force_host_platform_device_count=8", 8),
        ("--xla_a=1 --xla_force_host_platform_device_count=2 --xla_b", 2),
        (" ".join(f"--xla_force_host_platform_device_count={n}" for n in (4, 16)), 16),
    ],
)
def test_cpu_devices_that_xla_flags_ask_for_are_counted(monkeypatch, flags, expected) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert environment.num_forced_cpu_devices() == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, []),
        ("--xla_dump_to=here", []),
        ("--xla_a=1 --xla_disable_hlo_passes=first,second --xla_b", ["first", "second"]),
        ("--xla_disable_hlo_passes=first --xla_disable_hlo_passes=second", ["second"]),
    ],
)
def test_passes_that_xla_flags_disable_are_found(monkeypatch, flags, expected) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert environment.disabled_xla_passes() == expected


def test_thread_pool_has_four_threads_a_device_or_those_of_the_user(monkeypatch) -> None:
    monkeypatch.setenv("NPROC", "")
    monkeypatch.delenv("NPROC")
    environment.size_cpu_thread_pool(3)
    assert os.environ["NPROC"] == "12"
    environment.size_cpu_thread_pool(5)
    assert os.environ["NPROC"] == "12"


def test_choice_of_another_backend_is_refused_before_keras_is_loaded(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with pytest.raises(ImportError, match=r"KERAS_BACKEND is 'torch'\.(?s:.)*unset KERAS_BACKEND"):
        environment.require_jax_choice()
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    environment.require_jax_choice()


@pytest.mark.parametrize(
    ("text", "expected"), [(None, None), ("", None), ("  ", None), (" a b ", "a b")]
)
def test_other_program_s_variable_is_looked_up(monkeypatch, text, expected) -> None:
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if text is not None:
        monkeypatch.setenv("SLURM_PROCID", text)
    assert environment.lookup("SLURM_PROCID") == expected
    assert environment.get("SLURM_PROCID") == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", ()),
        ("0", ("0",)),
        ("2, 0,GPU-1f", ("2", "0", "GPU-1f")),
        # CUDA stops at the first that names no GPU.
        ("1,-1,2", ("1",)),
        ("-1", ()),
        ("NoDevFiles", ()),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_use(monkeypatch, text, expected) -> None:
    monkeypatch.setattr(environment, "_assigned_gpus", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if text is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", text)
    assert environment.visible_gpus() == expected


@pytest.mark.parametrize("before", [None, "4,5,6"])
def test_gpus_that_were_shown_are_left_out_of_account(monkeypatch, before) -> None:
    monkeypatch.setattr(environment, "_assigned_gpus", {})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    all_gpus = environment.visible_gpus()
    for ids in (["5"], ["4", "6"]):
        environment.show_gpus(ids)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(ids)
        assert environment.visible_gpus() == all_gpus
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    assert environment.visible_gpus() == ("9",)
    environment.show_gpus(["1"])
    assert environment.visible_gpus() == ("9",)


@pytest.fixture
def noted(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_recorded_settings", [])
    monkeypatch.setenv("JAX_ENABLE_X64", "0")
    environment.record_library_settings()


@pytest.mark.parametrize(("name", "text"), [("JAX_ENABLE_X64", "1"), ("KERAS_HOME", "/elsewhere")])
def test_setting_that_was_read_may_not_change(noted, monkeypatch, name, text) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")  # which is read later
    environment.require_unchanged_settings()
    monkeypatch.setenv(name, text)
    with pytest.raises(
        RuntimeError, match=f"The program sets {name} to '{text}', but the launcher loaded JAX"
    ):
        environment.require_unchanged_settings()
    monkeypatch.setattr(environment, "_recorded_settings", [])
    environment.require_unchanged_settings()  # where nothing was noted


def test_variables_are_replaced_as_a_whole() -> None:
    before = environment.snapshot()
    try:
        environment.replace({"ONLY": "this"})
        assert dict(os.environ) == {"ONLY": "this"}
    finally:
        environment.replace(before)
    assert dict(os.environ) == before


# Freed memory, which a process keeps or gives back.

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


def test_process_with_little_address_space_starts() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**31, 2**31)); "
    run_fresh(f"{limit}import stratagem", JAX_PLATFORMS="cpu")


RELEASED = """
import stratagem
import numpy as np
from stratagem.environment import release_freed_memory
from stratagem.observe.process_writer import resident_bytes

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
    ("platforms", "accelerators", "chosen", "system", "keeps"),
    [
        ("cpu", ["/dev/null"], {}, "linux", True),
        ("cpu,cuda", [], {}, "linux", True),
        ("cuda,cpu", [], {}, "linux", False),
        (None, [], {}, "linux", True),
        (None, ["/dev/null"], {}, "linux", False),
        ("cpu", [], {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, "linux", False),
        ("cpu", [], {"MALLOC_ARENA_MAX": "2"}, "linux", False),
        ("cpu", [], {}, "darwin", False),
    ],
)
def test_memory_is_kept_only_for_training_on_cpu(
    monkeypatch, calls, platforms, accelerators, chosen, system, keeps
) -> None:
    monkeypatch.setattr(host_memory, "_ACCELERATORS", accelerators)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for name, value in {**chosen, **({"JAX_PLATFORMS": platforms} if platforms else {})}.items():
        monkeypatch.setenv(name, value)
    assert not host_memory.keep_freed_memory()  # none of its calls has an effect here
    assert bool(calls) is keeps


# Reductions, variable aggregation and input options.


def test_members_have_tensorflow_s_numbers_and_options_their_fields() -> None:
    numbers = {"AUTO": 0, "NONE": 1, "ON_WRITE": 2, "ON_READ": 3}
    assert {member.name: int(member) for member in VariableSynchronization} == numbers
    numbers = {"NONE": 0, "SUM": 1, "MEAN": 2, "ONLY_FIRST_REPLICA": 3}
    assert {member.name: int(member) for member in VariableAggregation} == numbers
    assert [member.name for member in ReduceOp] == ["SUM", "MEAN"]
    assert dataclasses.asdict(RunOptions()) == {
        "experimental_enable_dynamic_batch_size": True,
        "experimental_bucketizing_dynamic_shape": False,
        "experimental_xla_options": None,
    }
    for op in ("max", "", " sum", None, 0, VariableAggregation.SUM):
        words = r'is not a reduction(?s:.)*ReduceOp.SUM, ReduceOp.MEAN, "s'
        with pytest.raises(ValueError, match=words):
            ReduceOp.parse(op)
    assert [ReduceOp.parse(op) for op in ("sum", "Mean")] == [ReduceOp.SUM, ReduceOp.MEAN]
    with pytest.raises(ValueError, match=r"has no reduction(?s:.)*set the variable's aggregation"):
        ReduceOp.from_variable_aggregation(VariableAggregation.NONE)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("SUM", ReduceOp.SUM), ("MEAN", ReduceOp.MEAN), ("ONLY_FIRST_REPLICA", ReduceOp.MEAN)],
)
def test_aggregation_asks_for_a_reduction(aggregation, expected) -> None:
    assert ReduceOp.from_variable_aggregation(VariableAggregation[aggregation]) is expected


@pytest.mark.parametrize(("size", "nearest"), [(13, "12 or 16"), (3, "4")])
def test_batch_that_does_not_divide_names_the_nearest(size, nearest) -> None:
    with pytest.raises(
        ValueError, match=rf"={size} is not a multiple of 4(?s:.)*use {nearest}, or"
    ):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)
    assert InputContext(2, 1, 4).get_per_replica_batch_size(12) == 3


def test_input_options_have_tensorflow_s_defaults_and_short_names() -> None:
    options = InputOptions()
    assert dataclasses.asdict(options) == {
        "experimental_fetch_to_device": True,
        "experimental_replication_mode": InputReplicationMode.PER_WORKER,
        "experimental_place_dataset_on_device": False,
        "experimental_per_replica_buffer_size": 1,
        "auto_shard_policy": AutoShardPolicy.AUTO,
        "input_workers": 0,
    }
    assert options.fetch_to_device
    assert options.replication_mode is InputReplicationMode.PER_WORKER
    assert not options.place_dataset_on_device
    assert options.per_replica_buffer_size == 1
    short = InputOptions(
        fetch_to_device=False,
        replication_mode=InputReplicationMode.PER_REPLICA,
        place_dataset_on_device=True,
        per_replica_buffer_size=0,
    )
    assert short == InputOptions(False, InputReplicationMode.PER_REPLICA, True, 0)
    assert short != options


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (
            {"prefetch": 2},
            TypeError,
            r"InputOptions received the unknown option prefetch=2.\nExpected names among",
        ),
        ({"replication_mode": "PER_REPLICA"}, TypeError, "experimental_replication_mode='PER_REPL"),
        ({"per_replica_buffer_size": 1.5}, TypeError, "_buffer_size=1.5 is of type float"),
        ({"per_replica_buffer_size": True}, TypeError, "_buffer_size=True is of type bool"),
        ({"per_replica_buffer_size": -1}, ValueError, "_buffer_size=-1"),
        ({"auto_shard_policy": 2}, TypeError, "auto_shard_policy=2 is of type int"),
        ({"input_workers": -1}, ValueError, "input_workers=-1"),
        ({"input_workers": "2"}, TypeError, "input_workers='2' is of type str"),
        ({"place_dataset_on_device": True}, ValueError, "was given with experimental_fetch"),
    ],
)
def test_input_options_that_cannot_be_are_refused(wrong, error, message) -> None:
    with pytest.raises(error, match=message):
        InputOptions(**wrong)


# Loading of optional libraries.


def test_missing_library_is_named_with_its_package() -> None:
    with pytest.raises(
        ImportError,
        match=r"GCEClusterResolver needs no_such_library, which cannot be imported: No mod(?s:.)*"
        r"pip install a-name",
    ):
        load("no_such_library", needed_by="GCEClusterResolver", install="a-name")
    assert load("json", needed_by="a test", install="nothing") is json
