"""TensorFlow names spelled differently here: aliases, and errors that name the replacement."""

from __future__ import annotations

import concurrent.futures
import importlib
import operator
import pickle
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem import config, errors
from stratagem import errors as exit_codes
from stratagem.cluster.preemption.configuration import GOOGLE_CLOUD_EXIT_CODE
from stratagem.errors import (
    OLD_METHODS,
    OLD_NAMES,
    SAME_METHODS,
    raise_reported,
    report_error,
    take_reported,
)
from stratagem.logs import notebook_display, plain_text, printable
from tests.fresh_process import run_fresh


@pytest.fixture
def strategy() -> Any:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize("name", sorted(OLD_NAMES))
def test_old_name_of_the_root_names_the_new_one(name) -> None:
    with pytest.raises(AttributeError, match=re.escape(f"Fix: use {OLD_NAMES[name]}")):
        getattr(sg, name)
    assert not hasattr(sg, name)
    assert name not in dir(sg)


@pytest.mark.parametrize("name", sorted(OLD_METHODS))
def test_old_method_names_the_new_one(strategy, name) -> None:
    with pytest.raises(AttributeError, match=f"has no method '{name}'") as caught:
        getattr(strategy, name)
    assert OLD_METHODS[name] in str(caught.value)
    assert not hasattr(strategy, name)
    assert name not in dir(strategy)


def test_same_methods_work_with_a_warning(strategy) -> None:
    assert not SAME_METHODS.keys() & set(dir(strategy))
    with pytest.warns(DeprecationWarning, match="experimental_run_v2 is an older name of Mirrored"):
        ones = strategy.experimental_run_v2(lambda: jnp.ones(()))
    with pytest.warns(DeprecationWarning, match="unwrap is an older name"):
        assert [*map(float, strategy.unwrap(ones))] == [1.0, 1.0]


def test_function_takes_the_arguments_of_the_decorator_and_names_others() -> None:
    @sg.function()
    def double(x: Any) -> Any:
        return 2 * x

    @sg.function(jit_compile=True, reduce_retracing=True)
    def triple(x: Any) -> Any:
        return 3 * x

    assert (float(double(2.0)), float(triple(2.0))) == (4.0, 6.0)
    with pytest.raises(TypeError, match="function received input_signature="):
        sg.function(input_signature=[jax.ShapeDtypeStruct((), "float32")])
    with pytest.raises(TypeError, match="function received fn=3 of type int"):
        sg.function(3)


@pytest.mark.parametrize("name", ["num_gpus", "num_gpus_per_worker"])
def test_old_arguments_name_the_new_ones(name) -> None:
    make: Any = sg.MirroredStrategy
    with pytest.raises(TypeError, match=f"MirroredStrategy received {name}=2"):
        make(**{name: 2})


def test_local_results_of_a_pytree_are_one_pytree_a_replica(strategy) -> None:
    x = strategy.distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))
    assert strategy.local_results({"x": x, "rest": ["text", None]}) == (
        {"x": 0.0, "rest": ["text", None]},
        {"x": 1.0, "rest": ["text", None]},
    )
    assert strategy.local_results({"x": 1.0}) == ({"x": 1.0},)
    doubled = strategy.local_results(jax.tree.map(lambda parts: 2 * parts, x))
    assert [*map(float, doubled)] == [0.0, 2.0]


@pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_run_steps_calls_a_function_as_run_does(strategy, eagerly) -> None:
    x = np.arange(8.0, dtype="float32")
    dataset = strategy.distribute_dataset(sg.input.Dataset((x, 2 * x), batch_size=4))

    def of_parts(x: Any, y: Any) -> Any:
        return jnp.sum(x * y)

    def of_batch(batch: Any) -> Any:
        return of_parts(*batch)

    expected = [float(np.sum(2 * part**2)) for part in (x[:4], x[4:])]
    sg.config.run_eagerly(eagerly)
    try:
        for fn in (of_parts, of_batch, lambda *batch: of_batch(*batch)):
            sums = strategy.run_steps(fn, iter(dataset), 2, reduce="sum")
            np.testing.assert_allclose(sums, expected)
            one = [strategy.run(of_parts, args=batch) for batch in dataset]
            np.testing.assert_allclose(
                [strategy.reduce("SUM", value, axis=None) for value in one], expected
            )
    finally:
        sg.config.run_eagerly(False)


# Completion lists public names, and hides nothing from code.

_LISTING = Path(__file__).parents[1] / "architecture" / "public_api.txt"
# The parts of a strategy, for authors of libraries: docs/libraries/new_strategy.md.
_PARTS = {"cross_device_ops", "executor", "placement", "topology", "variables"}
_OF_MIRRORED = {"tree_flatten", "tree_unflatten", "value"}


def _listed(owner: str) -> set[str]:
    """Public members of a class by the listing, without operators."""
    lines = _LISTING.read_text(encoding="utf-8").splitlines()
    names = {line.split("(")[0].strip() for line in lines if line.startswith(f"{owner}.")}
    members = {name.removeprefix(f"{owner}.") for name in names}
    return {name for name in members if not name.startswith("_")}


def test_package_lists_its_public_names() -> None:
    lines = _LISTING.read_text(encoding="utf-8").splitlines()
    tops = {line.removeprefix("sg.").split("(")[0].split()[0].split(".")[0] for line in lines}
    assert set(dir(sg)) == tops == set(sg.__all__)
    assert sg.__version__  # hidden, and still there


@pytest.mark.parametrize(
    ("make", "owner", "more"),
    [
        (lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]), "sg.MirroredStrategy", _PARTS),
        (lambda: sg.OneDeviceStrategy("cpu:0"), "sg.OneDeviceStrategy", _PARTS),
        (lambda: sg.PerReplica(objects=(1, 2)), "sg.PerReplica", set()),
        (lambda: sg.Mirrored(jax.numpy.ones(2)), "sg.DistributedValues", _OF_MIRRORED),
        (lambda: sg.ClusterSpec({"worker": ["a:1"]}), "sg.ClusterSpec", set()),
        (
            sg.cluster_resolver.TFConfigClusterResolver,
            "sg.cluster_resolver.TFConfigClusterResolver",
            set(),
        ),
    ],
    ids=["mirrored", "one device", "per replica", "mirrored value", "spec", "resolver"],
)
def test_object_lists_the_public_names_of_its_class(make, owner, more) -> None:
    value = make()
    assert set(dir(value)) == _listed(owner) | more
    assert all(hasattr(value, name) for name in dir(value))
    assert not any(name.startswith("_") for name in dir(value))


# Settings that a program can change.


@pytest.fixture
def eager() -> Iterator[None]:
    config.run_eagerly(True)
    yield
    config.run_eagerly(False)


def test_run_eagerly_holds_for_one_thread(eager) -> None:
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as executor:
        assert executor.submit(config.runs_eagerly).result() is False
    assert config.runs_eagerly() is True
    for enabled in (None, 1, "true"):
        with pytest.raises(TypeError, match=f"enabled={enabled!r} is of type (?s:.)*True or False"):
            config.run_eagerly(enabled)
    with pytest.raises(AttributeError, match="has no attribute 'run_greedily'"):
        _ = config.run_greedily


def test_run_eagerly_starts_from_the_environment() -> None:
    program = "from stratagem import config; print(config.runs_eagerly())"
    assert run_fresh(program, STRATAGEM_RUN_EAGERLY="1") == ["True"]


# Detection of a kernel, and text without control characters.

LINES = [
    ("plain \ttext", "plain \ttext", "plain \ttext"),
    ("\x1b[1m\x1b[32m50%\x1b[0m", "\x1b[1m\x1b[32m50%\x1b[0m", "50%"),
    ("\x1b[38;5;28;01mnone\x1b[39m", "\x1b[38;5;28;01mnone\x1b[39m", "none"),
    ("\x1b[?25l\x1b[2K\x1b[1Aup", "up", "up"),  # hide cursor, clear line, up
    ("\x1b]0;title\x07a\x1b]8;;http://b\x1b\\c", "ac", "ac"),  # title, link
    ("\x08\x08bell\x07\x00", "bell", "bell"),
    ("\x1b(B\x1b=end\x1b]never closed", "end", "end"),
    ("\x9b5D\x85next", "5Dnext", "5Dnext"),  # C1 controls
    ("\x1b", "\x1b", ""),
]


@pytest.mark.parametrize(("line", "shown", "plain"), LINES)
def test_only_colors_remain(line, shown, plain) -> None:
    assert printable(line) == shown
    assert plain_text(line) == plain


def _ipython(shell: object) -> types.ModuleType:
    module = types.ModuleType("IPython")
    vars(module)["get_ipython"] = lambda: shell
    return module


def test_kernel_has_a_display_and_others_have_none(monkeypatch) -> None:
    display = types.ModuleType("IPython.display")
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setitem(sys.modules, "IPython", _ipython(types.SimpleNamespace(kernel=object())))
    assert notebook_display() is display
    monkeypatch.setitem(sys.modules, "IPython", _ipython(types.SimpleNamespace()))  # a terminal
    assert notebook_display() is None
    monkeypatch.setitem(sys.modules, "IPython", _ipython(None))  # imported, not running
    assert notebook_display() is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook_display() is None


# Exception classes: each derives from a builtin, and survives pickling.

BUILTINS = {
    "CancelledError": RuntimeError,
    "ClosureAbortedError": RuntimeError,
    "ClosureInputError": RuntimeError,
    "DataLossError": OSError,
    "DeadlineExceededError": TimeoutError,
    "InvalidArgumentError": ValueError,
    "NotFoundError": LookupError,
    "OutOfRangeError": IndexError,
    "PSUnavailableError": ConnectionError,
    "PoisonExampleError": RuntimeError,
    "ResourceExhaustedError": MemoryError,
    "UnavailableError": ConnectionError,
}


def test_all_errors_are_in_the_table() -> None:
    assert sorted(BUILTINS) == errors.__all__


@pytest.mark.parametrize("name", BUILTINS)
def test_error_can_be_pickled(name) -> None:
    error = getattr(errors, name)("what was received\nExpected more\nFix: give more")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args
    assert isinstance(error, BUILTINS[name])


# Names of tf.distribute.experimental.


def test_names_are_those_without_the_prefix() -> None:
    of_their_own = {"MultiWorkerMirroredStrategy", "TPUStrategy"}
    names = sorted(set(dir(sg.experimental)) - of_their_own)
    assert "CommunicationOptions" in names
    for name in names:
        assert getattr(sg.experimental, name) is getattr(sg, name)
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchName'"):
        _ = sg.experimental.NoSuchName


def test_strategy_takes_the_algorithm_first() -> None:
    hierarchical = sg.experimental.CommunicationImplementation.HIERARCHICAL
    strategy = sg.experimental.MultiWorkerMirroredStrategy(hierarchical)
    assert isinstance(strategy, sg.MultiWorkerMirroredStrategy)
    assert strategy.communication_options.implementation is hierarchical
    options = sg.CommunicationOptions(bytes_per_pack=5)
    given = sg.experimental.MultiWorkerMirroredStrategy(communication_options=options)
    assert given.communication_options is options
    with pytest.raises(ValueError, match="implementation='STAR' is not a known algorithm"):
        sg.experimental.MultiWorkerMirroredStrategy("STAR")


def test_chips_take_the_assignment_second(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "cpu")
    topology = sg.tpu.experimental.initialize_tpu_system()
    assignment = sg.tpu.experimental.DeviceAssignment.build(topology, num_replicas=2)
    strategy = sg.experimental.TPUStrategy(None, assignment, steps_per_run=4)
    assert isinstance(strategy, sg.TPUStrategy)
    assert (strategy.num_replicas_in_sync, strategy.steps_per_run) == (2, 4)
    with pytest.raises(ValueError, match="tpu_cluster_resolver='local' is of type str"):
        sg.experimental.TPUStrategy("local")


# Exit codes: their values, and the table of the documentation.

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "exit_codes.md"


def test_codes_are_those_of_click_and_of_shells() -> None:
    assert click.ClickException.exit_code == exit_codes.FAILURE
    assert click.UsageError.exit_code == exit_codes.USAGE
    for name, code in (("INT", exit_codes.INTERRUPTED), ("TERM", exit_codes.TERMINATED)):
        finished = subprocess.run(["sh", "-c", f"sh -c 'kill -{name} $$'; exit $?"], check=False)
        assert finished.returncode == code


def test_program_that_saved_exits_with_the_code_that_launchers_resume() -> None:
    assert sg.preemption.EXIT_CODE == exit_codes.RESUMABLE
    assert GOOGLE_CLOUD_EXIT_CODE == exit_codes.TERMINATED


def test_every_code_is_in_the_table() -> None:
    table = re.findall(r"^\| (\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    codes = [value for name, value in vars(exit_codes).items() if name.isupper()]
    assert [int(code) for code in table] == sorted(code for code in codes if isinstance(code, int))


# Errors of background work.


def test_each_is_raised_once_the_oldest_first() -> None:
    raise_reported()
    report_error(OSError("first"))
    report_error(ValueError("second"))
    with pytest.raises(OSError, match="first"):
        raise_reported()
    with pytest.raises(ValueError, match="second"):
        raise_reported()
    raise_reported()
    assert take_reported() == []
    report_error(error := OSError("left"))
    assert take_reported() == [error]
    raise_reported()


# The stub of public names: each leads to the object of that name, in the module that it states.


LAZY = {
    package: sg.public_names(package.__file__)
    for package in (sg, sg.checkpoint, sg.cluster, sg.cluster_resolver, sg.preemption)
}


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package in LAZY for name in LAZY[package]]
)
def test_name_leads_to_the_object_at_its_home(package, name) -> None:
    module, attribute = LAZY[package][name]
    assert getattr(package, name) is getattr(importlib.import_module(module), attribute)
    assert name in vars(package)  # it stays there after its first use


@pytest.mark.parametrize("package", LAZY)
def test_listed_names_are_offered(package) -> None:
    names: dict[str, object] = {}
    exec(f"from {package.__name__} import *", names)
    assert set(names) - {"__builtins__"} == set(dir(package)) <= set(LAZY[package])


# Each name is listed once; its other spellings work.


def _listed_names(path: str, module: types.ModuleType) -> Iterator[tuple[str, Any]]:
    for name in module.__all__:
        value = getattr(module, name)
        yield f"{path}.{name}", value
        if isinstance(value, types.ModuleType):
            yield from _listed_names(f"{path}.{name}", value)


def test_each_object_is_listed_once() -> None:
    names: dict[int, list[str]] = {}
    for name, value in _listed_names("sg", sg):
        if callable(value) or isinstance(value, types.ModuleType):
            names.setdefault(id(value), []).append(name)
    assert [found for found in names.values() if len(found) > 1] == []


@pytest.mark.parametrize(
    ("other", "listed"),
    [
        ("Checkpoint", "train.Checkpoint"),
        ("CollectiveCommunication", "CommunicationImplementation"),
        ("checkpoint.latest_checkpoint", "train.latest_checkpoint"),
        ("cluster.SlurmClusterResolver", "cluster_resolver.SlurmClusterResolver"),
        ("coordinator.CoordinatorOptions", "coordinator.options"),
        ("estimator.experimental.stop_if_lower_hook", "estimator.stop_if_lower_hook"),
        ("estimator.get_global_step", "train.get_global_step"),
        ("experimental.ParameterServerStrategy", "ParameterServerStrategy"),
        ("experimental_set_strategy", "set_strategy"),
        ("input.DistributedDataset", "DistributedDataset"),
        ("launch.ElasticConfig", "ElasticConfig"),
        ("nn.compute_average_loss", "compute_average_loss"),
        ("planning.plan", "plan"),
        ("preemption.TerminationConfig", "TerminationConfig"),
        ("remote.Server", "Server"),
        ("run_standard_tensorflow_server", "run_standard_server"),
        ("summary.experimental.set_step", "summary.set_step"),
        ("tpu.experimental.DeviceAssignment", "tpu.DeviceAssignment"),
        ("train.ClusterSpec", "ClusterSpec"),
    ],
)
def test_other_spelling_is_the_same_object(other, listed) -> None:
    assert operator.attrgetter(other)(sg) is operator.attrgetter(listed)(sg)
    holder, _, name = other.rpartition(".")
    module = operator.attrgetter(holder)(sg) if holder else sg
    assert name not in module.__all__ or holder.rpartition(".")[2] == "experimental"
