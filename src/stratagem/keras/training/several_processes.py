"""Calls that one of several processes carries out for all: progress bars and file writes.

Every process calls `save`, `save_weights` or `export` of a model, the chief writes, and all return
when the file is there.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras

from stratagem.group import agree_on_random_state, current_group
from stratagem.keras.training.callback_support import CHIEF_ONLY, listed
from stratagem.messages import explain
from stratagem.options import VariableAggregation
from stratagem.variables import VariableKind, WholeValue, home_of, store_of

__all__ = ["saved_once", "settle_call"]


def settle_call(arguments: dict[str, Any], wants_logs: bool) -> bool:
    """Makes `fit`, `evaluate` or `predict` equal on all processes, and silent on all but one.

    Args:
        arguments: arguments of the call by name; changed in place.
        wants_logs: True if this process needs the logs of single batches.

    Returns:
        True if any process needs them: then all must compute them.
    """
    group = current_group()
    assert group is not None
    agree_on_random_state()  # Arrays are shuffled by it.
    wants_logs = any(group.exchange("who looks at logs", wants_logs))
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
    """Returns a saving method of a model such that only the chief writes."""
    name = original.__name__

    @functools.wraps(original)
    def save(self: Any, *args: Any, **kwargs: Any) -> Any:
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
            except Exception as raised:  # noqa: BLE001 - raised again when the others know
                error = raised
            _let_go(strategy)
        told = group.exchange(f"model.{name}", None if error is None else repr(error))[0]
        if error is not None:
            raise error
        if told is not None:
            raise RuntimeError(
                explain(
                    f"{group.identity.labels[0]} could not write in model.{name}: {told}",
                    expected="a file that process 0 can write.",
                    fix="see its log for the whole error.",
                )
            )
        return result

    return save


def _bring_together(strategy: Any, *, is_reader: bool) -> None:
    """Gathers components and shards, so that the chief can then read them alone."""
    for variable in strategy.variables.live():
        home = home_of(variable)
        assert home is not None
        if home.kind is VariableKind.ON_READ and home.aggregation is not VariableAggregation.NONE:
            _ = variable.value
        elif store_of(variable) is not None:
            variable.hold_whole(is_reader=is_reader)


def _let_go(strategy: Any) -> None:
    """Frees the gathered copies of sharded values."""
    for variable in strategy.variables.live():
        if store_of(variable) is not None:
            variable.whole = WholeValue()
