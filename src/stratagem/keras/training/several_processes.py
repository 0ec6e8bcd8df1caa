"""Progress bars and file writes by one process for all.

Every process calls `save`, `save_weights` or `export` of a model, the functions of `keras.saving`,
or `save_to_preset` of a model of KerasHub. The chief writes, and all return when the files are
there.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import keras

from stratagem.group.current import current_group
from stratagem.group.random_state import agree_on_random_state
from stratagem.keras.training.callback_support import CHIEF_ONLY, listed
from stratagem.keras.training.data_lengths import (
    data_lengths,
    data_rows,
    require_equal_lengths,
    require_equal_rows,
)
from stratagem.keras.variables.stored_reads import announces_gathers, announcing_gathers
from stratagem.messages import explain
from stratagem.options import VariableAggregation
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from stratagem.group.member import Group
    from stratagem.keras.variables.variable import DistributedVariable
    from stratagem.strategies.base.strategy import Strategy


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
        _gather_components(strategy)
        write = functools.partial(original, model, *args, **kwargs)
        result, error, text = written_by_first(name, group, _by_key(strategy), write)
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
    variables: dict[tuple[str, int], DistributedVariable],
    write: Callable[[], Any],
) -> tuple[Any, Exception | None, str | None]:
    """Writes on process 0; the others join the gather of each value that it reads.

    So process 0 holds one whole value at a time. Returns the result and the error of this process,
    and process 0's error as a text.
    """
    if group.process_id != 0:
        while (message := group.exchange(name, None)[0])["gather"] is not None:
            variables[tuple(message["gather"])].gathered()
        return None, None, message["error"]
    keys = {id(variable): key for key, variable in variables.items()}
    result, error = None, None

    def announce(variable: object) -> None:
        group.exchange(name, {"gather": list(keys[id(variable)]), "error": None})

    try:
        with announcing_gathers(announce):
            result = write()
    except Exception as raised:  # noqa: BLE001 - raised by the caller, once all know
        error = raised
    text = None if error is None else repr(error)
    group.exchange(name, {"gather": None, "error": text})
    return result, error, text


def _gather_components(strategy: Strategy) -> None:
    """Gathers components of all replicas, so that the chief can read them without the others."""
    for variable in _live(strategy):
        home = home_of(variable)
        assert home is not None
        if home.kind is VariableKind.ON_READ and home.aggregation is not VariableAggregation.NONE:
            _ = variable.value


def _by_key(strategy: Strategy) -> dict[tuple[str, int], DistributedVariable]:
    """Returns variables with stores by path, and by the number of earlier ones of this path."""
    counts: Counter[str] = Counter()
    variables: dict[tuple[str, int], DistributedVariable] = {}
    for variable in _live(strategy):
        if variable.is_in_parts:
            variables[variable.path, counts[variable.path]] = variable
            counts[variable.path] += 1
    return variables


def _live(strategy: Strategy) -> list[DistributedVariable]:
    return cast("list[DistributedVariable]", strategy.variables.live())
