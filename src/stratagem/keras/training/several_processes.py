"""Progress bars and file writes by one process for all.

Every process calls `save`, `save_weights` or `export` of a model, the chief writes, and all return
when the file is there.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import keras

from stratagem.keras.training.callback_support import CHIEF_ONLY, listed
from stratagem.keras.training.data_lengths import data_lengths, require_equal_lengths
from stratagem.messages import explain
from stratagem.options import VariableAggregation
from stratagem.process_group import agree_on_random_state, current_group
from stratagem.variables import VariableKind, WholeValue, home_of

if TYPE_CHECKING:
    from stratagem.keras.variables.variable import DistributedVariable
    from stratagem.strategies.base.strategy import Strategy


__all__ = ["saved_once", "settle_call"]


def settle_call(arguments: dict[str, Any], wants_logs: bool) -> bool:
    """Makes a `fit`, `evaluate` or `predict` call equal on all processes; only the chief prints.

    Changes `arguments` (by name) in place. Returns True if any process needs the logs of single
    batches; then all must compute them. Raises ValueError if lengths of data differ.
    """
    group = current_group()
    assert group is not None
    agree_on_random_state()  # It determines the shuffling of arrays.
    calls = group.exchange("a call of fit", (wants_logs, data_lengths(arguments)))
    require_equal_lengths([lengths for _, lengths in calls], group.identity.labels)
    wants_logs = any(wants for wants, _ in calls)
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
    """Wraps Keras's saving method `original` so that only the chief writes."""
    name = original.__name__

    @functools.wraps(original)
    def save(self: keras.Model, *args: object, **kwargs: object) -> Any:
        homes = [home_of(variable) for variable in self.variables]
        strategy = next((home.strategy for home in homes if home is not None), None)
        group = current_group()
        if group is None or strategy is None or not strategy.topology.spans_processes:
            return original(self, *args, **kwargs)
        _bring_together(strategy, is_reader=group.process_id == 0)
        error: Exception | None = None
        result = None
        if group.process_id == 0:
            try:
                result = original(self, *args, **kwargs)
            except Exception as raised:  # noqa: BLE001 - raised below, once all know
                error = raised
            _let_go(strategy)
        text = group.exchange(f"model.{name}", None if error is None else repr(error))[0]
        if error is not None:
            raise error
        if text is not None:
            raise RuntimeError(
                explain(
                    f"{group.identity.labels[0]} failed to write the file of model.{name}: {text}",
                    expected="a path that process 0 can write to.",
                    fix="read the full error in the log of process 0.",
                )
            )
        return result

    return save


def _bring_together(strategy: Strategy, *, is_reader: bool) -> None:
    """Gathers components and shards, so that the chief can read them without the others."""
    for variable in _live(strategy):
        home = home_of(variable)
        assert home is not None
        if home.kind is VariableKind.ON_READ and home.aggregation is not VariableAggregation.NONE:
            _ = variable.value
        elif variable.is_in_parts:
            variable.hold_whole(is_reader=is_reader)


def _let_go(strategy: Strategy) -> None:
    """Frees the gathered copies of sharded values."""
    for variable in _live(strategy):
        if variable.is_in_parts:
            variable.whole = WholeValue()


def _live(strategy: Strategy) -> list[DistributedVariable]:
    return cast("list[DistributedVariable]", strategy.variables.live())
