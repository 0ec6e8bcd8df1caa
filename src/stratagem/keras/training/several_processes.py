"""Progress bars and file writes by one process for all.

Every process calls `save`, `save_weights` or `export` of a model, the functions of `keras.saving`,
or `save_to_preset` of a model of KerasHub. The chief writes, and all return when the files are
there.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import zlib
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, cast

import jax
import keras
import numpy as np

from stratagem.errors import explain, invalid
from stratagem.group.current import agree_on_random_state, current_group
from stratagem.input.batches import is_on_accelerator
from stratagem.keras.patches import patches, wraps_methods
from stratagem.keras.training.datasets import DatasetAdapter
from stratagem.keras.variables.variable import announces_gathers, announcing_gathers
from stratagem.options import VariableAggregation
from stratagem.variables.components import agree_on_initial_values
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    from stratagem.group.member import Group
    from stratagem.keras.variables.variable import DistributedVariable
    from stratagem.strategies.strategy import Strategy

# Lengths and rows of data and numbers of steps, which must be equal in all processes of `fit`.
#
# Each process reads the same arrays and uses its part of each batch. With another array, such as a
# part of its own, most of the data would never be read.

_DATA = ("x", "validation_data")
_NUMBERS = (
    "batch_size",
    "epochs",
    "initial_epoch",
    "steps",
    "steps_per_epoch",
    "validation_batch_size",
    "validation_steps",
)
_ARRAYS = ("x", "y", "sample_weight", "validation_data")
_NUM_ROWS, _MOST_OF_A_ROW = 16, 65_536
_LIBRARIES = ("pandas", "tensorflow", "torch")
_FIX = (
    "pass the same arguments everywhere. If each worker reads its own data, pass "
    "strategy.distribute_datasets_from_function(...), or a dataset with AutoShardPolicy.OFF."
)
_EXPECTED = (
    "the same call with the same data on every worker, which takes its own part of each batch."
)


def data_lengths(arguments: Mapping[str, Any]) -> dict[str, int]:
    """Returns the known lengths and numbers among the arguments of a call, by their names."""
    found = {name: arguments.get(name) for name in _NUMBERS}
    found |= {f"the length of {name}": _length(arguments.get(name)) for name in _DATA}
    return {name: number for name, number in found.items() if isinstance(number, int)}


def require_equal_lengths(of_processes: Sequence[dict[str, int]], labels: Sequence[str]) -> None:
    """Raises ValueError, with the number of each process, if a known one differs."""
    for name in dict.fromkeys(name for lengths in of_processes for name in lengths):
        numbers = [lengths.get(name) for lengths in of_processes]
        if len({number for number in numbers if number is not None}) > 1:
            each = ", ".join(
                f"{'unknown' if number is None else number} on {label}"
                for label, number in zip(labels, numbers, strict=True)
            )
            raise invalid(
                f"The workers differ in {name}: {each}.",
                expected=_EXPECTED,
                fix=_FIX,
                code="SG507",
            )


def _length(data: object) -> int | None:
    """Returns the number of examples of arrays, or of batches of a dataset; None if unknown."""
    if isinstance(data, DatasetAdapter):
        return data.num_batches
    shapes: list[tuple[int, ...]] = [
        getattr(leaf, "shape", ()) for leaf in keras.tree.flatten(data)
    ]
    if shapes and all(shapes):
        return int(shapes[0][0])
    with contextlib.suppress(TypeError):  # of unknown length
        return len(data) if isinstance(data, Sized) else None
    return None


def data_rows(arguments: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Returns a number for each of some rows of the arrays among the arguments of a call."""
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name in _ARRAYS:
        data = arguments.get(name)
        if isinstance(data, DatasetAdapter):
            data = data.arrays_of_all
        for path, leaf in keras.tree.flatten_with_path(data):
            with contextlib.suppress(Exception):  # of another library; Keras reports what is wrong
                if (numbers := _numbers(leaf)) is not None:
                    found[name + "".join(f"[{key!r}]" for key in path)] = numbers
    return found


def require_equal_rows(
    of_processes: Sequence[dict[str, np.ndarray[Any, Any]]], labels: Sequence[str]
) -> None:
    """Raises ValueError, with the first row that differs, if a process has other arrays."""
    first, *others = of_processes
    for label, other in zip(labels[1:], others, strict=True):
        for name in [name for name in first if name in other]:
            mine, theirs = first[name], other[name]
            if mine.shape != theirs.shape:
                continue  # of other lengths, which Keras or the lengths of all tell
            # Rows may be computed by unlike processors.
            known = np.abs(mine[1][np.isfinite(mine[1])])
            least = 1e-4 * float(np.median(known)) if len(known) else 0.0
            are_close = np.isclose(mine[1], theirs[1], rtol=1e-3, atol=least, equal_nan=True)
            if not are_close.all():
                row = int(mine[0][np.argmin(are_close)])
                raise invalid(
                    f"The workers differ in the values of {name}: row {row} is another on "
                    f"{label} than on {labels[0]}.",
                    expected=_EXPECTED,
                    fix=_FIX,
                    code="SG507",
                )


def _numbers(leaf: Any) -> np.ndarray[Any, Any] | None:
    """Returns the places of some rows of an array, and a number of each; None for other data."""
    is_known = isinstance(leaf, np.ndarray | jax.Array)
    if not is_known and type(leaf).__module__.partition(".")[0] not in _LIBRARIES:
        return None
    if (
        not leaf.shape
        or not leaf.shape[0]
        or (isinstance(leaf, jax.Array) and not leaf.is_fully_addressable)
    ):
        return None
    places = np.unique(np.linspace(0, leaf.shape[0] - 1, _NUM_ROWS).astype(int))
    if is_on_accelerator(leaf):
        rows = np.asarray(leaf[places])  # not the whole array
    else:
        leaf = np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf
        rows = [np.asarray(leaf[place : place + 1]) for place in places]
    numbers = [_number(np.reshape(row, -1)[:_MOST_OF_A_ROW]) for row in rows]
    return None if None in numbers else np.array([places, numbers], "float64")


def _number(row: np.ndarray[Any, Any]) -> float | None:
    if row.dtype.kind in "SU":
        return float(zlib.crc32(row.tobytes()))
    if row.dtype.kind not in "biufcV":
        return None
    values = np.abs(row) if row.dtype.kind == "c" else row.astype("float64")
    return float(values @ np.linspace(1, 2, len(values)))


# Checks Keras callbacks for support under a strategy. Table: `docs/guides/keras.md`.

# These write or show only the logs, which are the same on all processes.
CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
)

# Each process would write the same files, or one would read variables that need all processes.
_OF_ONE_PROCESS = {
    "BackupAndRestore": "sg.BackupAndRestore, which also resumes at the next batch",
    "OrbaxCheckpoint": "sg.BackupAndRestore, or sg.train.CheckpointManager in a callback",
    "TensorBoard": "sg.TensorBoard, which works without TensorFlow",
}


def listed(callbacks: object) -> list[Any]:
    """Returns the `callbacks` argument of `fit` as a list."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def check_callbacks(name: str, callbacks: Sequence[Any], *, spans_processes: bool) -> None:
    """Raises NotImplementedError or ImportError for callbacks that would fail during training.

    `name` is the method for messages; `spans_processes` is True if several processes call it.
    """
    for callback in callbacks:
        kind = _keras_name(callback)
        if kind is None:
            continue
        if spans_processes:
            raise NotImplementedError(
                explain(
                    f"{name} received keras.callbacks.{kind}, but the strategy spans several "
                    "processes and each would write its own files.",
                    expected="a callback that writes files from one process only.",
                    fix=f"use {_OF_ONE_PROCESS[kind]}.",
                    code="SG413",
                )
            )
        if kind == "TensorBoard" and importlib.util.find_spec("tensorflow") is None:
            raise ImportError(
                explain(
                    f"{name} received keras.callbacks.TensorBoard, which needs TensorFlow, but "
                    "TensorFlow is not installed.",
                    expected="a callback that works without TensorFlow.",
                    fix=f"use {_OF_ONE_PROCESS[kind]}.",
                    code="SG413",
                )
            )


def _keras_name(callback: keras.callbacks.Callback) -> str | None:
    """Returns the name of an unsupported Keras callback class; None for other classes."""
    for name in _OF_ONE_PROCESS:
        class_ = getattr(keras.callbacks, name, None)  # OrbaxCheckpoint came with Keras 3.13
        if class_ is not None and isinstance(callback, class_):
            return name
    return None


def settle_call(arguments: dict[str, Any], wants_logs: bool) -> bool:
    """Makes a `fit`, `evaluate` or `predict` call equal on all processes; only the chief prints.

    Changes `arguments` (by name) in place. Returns True if any process needs the logs of single
    batches; then all must compute them. Raises ValueError if data or its lengths differ.
    """
    group = current_group()
    assert group is not None
    agree_on_random_state()  # It determines the shuffling of arrays.
    own = (wants_logs, data_lengths(arguments), data_rows(arguments))
    calls = group.exchange("a call of fit", own)
    require_equal_lengths([lengths for _, lengths, _ in calls], group.identity.labels)
    require_equal_rows([rows for _, _, rows in calls], group.identity.labels)
    wants_logs = any(wants for wants, _, _ in calls)
    callbacks = arguments.get("callbacks")
    if callbacks is not None and not isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = listed(callbacks)
        _make_folders(callbacks)
        if group.process_id != 0:
            arguments["callbacks"] = [one for one in callbacks if not isinstance(one, CHIEF_ONLY)]
    if group.process_id != 0:
        arguments["verbose"] = 0
    return wants_logs


def _make_folders(callbacks: Sequence[Any]) -> None:
    """Creates the folders of `ModelCheckpoint`; Keras fails if two processes do so at once."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.ModelCheckpoint):
            fixed, _, _ = os.fspath(callback.filepath).partition("{")
            with contextlib.suppress(OSError):  # Keras reports the problem.
                os.makedirs(os.path.dirname(fixed) or ".", exist_ok=True)


@patches(
    keras.Model,
    *("save", "save_weights", "export"),
    why="the chief writes, and all processes return when the file is complete",
)
@patches(keras.saving, "save_model", "save_weights", why="the same for functions")
@patches(keras.models, "save_model", why="the same")
# KerasHub's, which write several files.
@wraps_methods("export_to_transformers", "save_task_weights", "save_to_preset")
def saved_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a saving method or function of models so that only the chief writes."""
    is_method = "." in original.__qualname__
    name = f"{'model' if is_method else 'keras.saving'}.{original.__name__}"

    @functools.wraps(original)
    def save(model: keras.Model, *args: object, **kwargs: object) -> Any:
        homes = [home_of(variable) for variable in getattr(model, "variables", ())]
        strategy = next((home.strategy for home in homes if home is not None), None)
        group = current_group()
        if (
            group is None
            or strategy is None
            or not strategy.topology.spans_processes
            or announces_gathers()  # called by another saving method, on the chief
        ):
            return original(model, *args, **kwargs)
        agree_on_initial_values(strategy.variables, strategy.topology)
        _gather_components(model)
        write = functools.partial(original, model, *args, **kwargs)
        result, error, text = written_by_first(name, group, _by_number(strategy), write)
        if error is not None:
            raise error
        if text is not None:
            raise RuntimeError(
                explain(
                    f"{group.identity.labels[0]} failed in {name}: {text}",
                    expected="a path that process 0 can write to.",
                    fix="read the full error in the log of process 0.",
                )
            )
        return result

    return save


def written_by_first(
    name: str,
    group: Group,
    variables: dict[int, DistributedVariable],
    write: Callable[[], Any],
) -> tuple[Any, Exception | None, str | None]:
    """Writes on process 0; the others join the gather of each value that it reads.

    So process 0 holds one whole value at a time. Returns the result and the error of this process,
    and process 0's error as a text.
    """
    if group.process_id != 0:
        while (message := group.exchange(name, None)[0])["gather"] is not None:
            variables[message["gather"]].gathered()
        return None, None, message["error"]
    numbers = {id(variable): number for number, variable in variables.items()}
    result, error = None, None

    def announce(variable: object) -> None:
        group.exchange(name, {"gather": numbers[id(variable)], "error": None})

    try:
        with announcing_gathers(announce):
            result = write()
    except Exception as raised:  # noqa: BLE001 - raised by the caller, once all know
        error = raised
    text = None if error is None else repr(error)
    group.exchange(name, {"gather": None, "error": text})
    return result, error, text


def _gather_components(model: Any) -> None:
    """Gathers components of all replicas, so that the chief can read them without the others.

    Only the model's: garbage collection may have freed other variables on some processes.
    """
    parts = (model, getattr(model, "optimizer", None))
    variables = [one for part in parts for one in getattr(part, "variables", ())]
    for variable in [*variables, *getattr(model, "metrics_variables", ())]:
        home = home_of(variable)
        if home is None or home.kind is not VariableKind.ON_READ:
            continue
        if home.aggregation is not VariableAggregation.NONE:
            _ = variable.value


def _by_number(strategy: Strategy) -> dict[int, DistributedVariable]:
    """Returns variables with stores by the number that all processes have agreed on."""
    live = cast("list[DistributedVariable]", strategy.variables.live())
    found = ((variable.agreed_number, variable) for variable in live if variable.is_in_parts)
    return {number: variable for number, variable in found if number is not None}
