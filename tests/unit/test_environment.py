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


@pytest.mark.parametrize("chosen", [None, ""])
def test_jax_is_selected_where_no_backend_is_chosen(monkeypatch, chosen) -> None:
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "")
    if chosen is None:
        monkeypatch.delenv("KERAS_BACKEND")
    environment.select_keras_backend()
    assert os.environ["KERAS_BACKEND"] == "jax"


def test_chosen_backend_is_left_alone(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "keras", raising=False)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    environment.select_keras_backend()
    assert os.environ["KERAS_BACKEND"] == "torch"


def test_keras_that_is_loaded_with_jax_is_fine(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", keras_on("jax"))
    environment.select_keras_backend()
    environment.require_jax_backend("jax")


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_that_is_loaded_with_another_backend_is_refused(monkeypatch, backend) -> None:
    words = f"Keras runs on the '{backend}' backend(?s:.)*`import stratagem` before `import keras`"
    monkeypatch.setitem(sys.modules, "keras", keras_on(backend))
    with pytest.raises(ImportError, match=words):
        environment.select_keras_backend()
    with pytest.raises(ImportError, match=words):
        environment.require_jax_backend(backend)


def test_keras_that_is_being_loaded_is_left_alone(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "keras", types.ModuleType("keras"))
    environment.select_keras_backend()


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


def test_thread_pool_has_four_threads_a_device(monkeypatch) -> None:
    monkeypatch.setenv("NPROC", "")
    monkeypatch.delenv("NPROC")
    environment.size_cpu_thread_pool(3)
    assert os.environ["NPROC"] == "12"


def test_thread_pool_that_the_user_has_sized_stays(monkeypatch) -> None:
    monkeypatch.setenv("NPROC", "5")
    environment.size_cpu_thread_pool(3)
    assert os.environ["NPROC"] == "5"


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
    environment.require_unchanged_settings()
    monkeypatch.setenv(name, text)
    with pytest.raises(
        RuntimeError, match=f"The program sets {name} to '{text}', but the launcher loaded JAX"
    ):
        environment.require_unchanged_settings()


def test_what_is_read_later_may_change(noted, monkeypatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    environment.require_unchanged_settings()


def test_any_setting_may_change_where_nothing_was_noted(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_recorded_settings", [])
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    environment.require_unchanged_settings()


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


@pytest.mark.skipif(not HAS_MALLOPT, reason="no mallopt")
def test_setting_is_read_when_the_library_is_imported() -> None:
    program = "import stratagem; from stratagem import environment; print(environment._is_kept)"
    assert run_fresh(program, JAX_PLATFORMS="cpu", STRATAGEM_KEEP_FREED_MEMORY="0") == ["False"]


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


# Reductions, variable aggregation and input options.


def test_members_have_tensorflow_s_numbers() -> None:
    assert {member.name: int(member) for member in VariableSynchronization} == {
        "AUTO": 0,
        "NONE": 1,
        "ON_WRITE": 2,
        "ON_READ": 3,
    }
    assert {member.name: int(member) for member in VariableAggregation} == {
        "NONE": 0,
        "SUM": 1,
        "MEAN": 2,
        "ONLY_FIRST_REPLICA": 3,
    }
    assert [member.name for member in ReduceOp] == ["SUM", "MEAN"]


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (ReduceOp.SUM, ReduceOp.SUM),
        ("SUM", ReduceOp.SUM),
        ("sum", ReduceOp.SUM),
        ("Mean", ReduceOp.MEAN),
        ("mEAN", ReduceOp.MEAN),
    ],
)
def test_reduction_is_known_by_its_name_in_any_case(op, expected) -> None:
    assert ReduceOp.parse(op) is expected


@pytest.mark.parametrize("op", ["max", "", " sum", None, 0, VariableAggregation.SUM], ids=repr)
def test_unknown_reduction_is_refused_with_those_there_are(op) -> None:
    with pytest.raises(
        ValueError, match=r'is not a reduction(?s:.)*ReduceOp.SUM, ReduceOp.MEAN, "s'
    ):
        ReduceOp.parse(op)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("SUM", ReduceOp.SUM), ("MEAN", ReduceOp.MEAN), ("ONLY_FIRST_REPLICA", ReduceOp.MEAN)],
)
def test_aggregation_asks_for_a_reduction(aggregation, expected) -> None:
    assert ReduceOp.from_variable_aggregation(VariableAggregation[aggregation]) is expected


def test_aggregation_none_asks_for_no_reduction() -> None:
    with pytest.raises(ValueError, match=r"has no reduction(?s:.)*set the variable's aggregation"):
        ReduceOp.from_variable_aggregation(VariableAggregation.NONE)


def test_run_options_have_tensorflow_s_fields_and_cannot_be_changed() -> None:
    assert dataclasses.asdict(RunOptions()) == {
        "experimental_enable_dynamic_batch_size": True,
        "experimental_bucketizing_dynamic_shape": False,
        "experimental_xla_options": None,
    }
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field"):
        RunOptions().experimental_xla_options = 1


def test_input_context_divides_the_global_batch() -> None:
    context = InputContext(2, 1, 4)
    assert context.get_per_replica_batch_size(12) == 3
    assert (context.num_input_pipelines, context.input_pipeline_id) == (2, 1)
    assert context.num_replicas_in_sync == 4


@pytest.mark.parametrize(("size", "nearest"), [(13, "12 or 16"), (3, "4")])
def test_batch_that_does_not_divide_names_the_nearest(size, nearest) -> None:
    with pytest.raises(
        ValueError, match=rf"={size} is not a multiple of 4(?s:.)*use {nearest}, or"
    ):
        InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(size)


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


def test_library_that_is_there_is_returned() -> None:
    assert load("json", needed_by="a test", install="nothing") is json


def test_missing_library_is_named_with_its_package() -> None:
    with pytest.raises(
        ImportError,
        match=r"GCEClusterResolver needs no_such_library, which cannot be imported: No mod(?s:.)*"
        r"pip install a-name",
    ):
        load("no_such_library", needed_by="GCEClusterResolver", install="a-name")
