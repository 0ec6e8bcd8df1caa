"""`fit` of processes that others can join, and that can join others."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import keras

from stratagem.input.batches import is_sparse
from stratagem.keras.callbacks.backup_and_restore import FitPosition
from stratagem.keras.callbacks.data_position import DataPosition
from stratagem.keras.numerics.random_state import RandomState
from stratagem.keras.private import ArrayDataAdapter, TFDatasetAdapter, set_initial_epoch
from stratagem.keras.training.active_fit import call_after_fit, epoch_iterator
from stratagem.keras.training.datasets import DatasetAdapter
from stratagem.keras.training.step_functions import TrainOrTestFunction
from stratagem.strategies.elastic import ElasticAdmission

_FitState = dict[str, Any]


class JoiningFit(keras.callbacks.Callback):
    """Admits processes before each batch. In a process that joins, `fit` begins at their batch."""

    runs_last = True
    needs_batch_logs = False

    def __init__(self, admission: ElasticAdmission) -> None:
        super().__init__()
        self._admission = admission
        self.callback_list: Any = None  # Keras's list of all callbacks
        self._place = ""
        self._position: FitPosition | None = None
        self._received: _FitState | None = None
        self._epoch = self._batch = 0  # batches completed in this epoch
        self._may_retry = True

    def on_train_begin(self, logs: object = None) -> None:
        """Joins the others, if they train already."""
        model: Any = self.model
        self._may_retry = model.steps_per_execution == 1
        others = [one for one in self.callback_list.callbacks if one is not self]
        iterator = epoch_iterator()
        self._place = self._admission.begin_call()
        self._received = None
        call_after_fit(self._admission.end_place)
        if not self._admission.is_waiting:
            self._position = FitPosition(DataPosition.of(iterator), others)
            return
        batches = _sample_batches(iterator.data_adapter)
        self._position = FitPosition(DataPosition.of(iterator), others)
        params: Any = self.params
        state = self._admission.join(self._place, lambda: _compile(model, batches))
        if state is None:
            set_initial_epoch(model, params["epochs"])
            return
        self._position.go_to(model, params["epochs"], state)
        self._received = state

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """In the first epoch after joining, undoes the changes at its start."""
        self._epoch, self._batch = epoch, 0
        received, self._received = self._received, None
        if received is None:
            return
        set_initial_epoch(self.model, None)
        self._admission.restore()
        self._batch = received["batch"]
        assert self._position is not None
        self._position.set_state(received)

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Admits processes that wait."""
        self._admission.admit(self._place, self._state, may_retry=self._may_retry)

    def _state(self) -> _FitState:
        assert self._position is not None
        return self._position.state(self.model, self._epoch, self._batch, is_within=True)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Counts batches."""
        self._batch = batch + 1

    def on_train_end(self, logs: object = None) -> None:
        """Ends a call that was skipped."""
        set_initial_epoch(self.model, None)


def _sample_batches(adapter: Any) -> list[Any]:
    """Returns a batch for its shapes, and one as short as the last of an epoch, if that is known.

    Returns none if reading them would change those that follow.
    """
    is_harmless = isinstance(adapter, ArrayDataAdapter | TFDatasetAdapter) or (
        isinstance(adapter, DatasetAdapter) and adapter.can_go_to
    )
    if not is_harmless:
        return []
    before = RandomState().get_state()
    try:
        batches: Any = iter(adapter.get_jax_iterator())
        batch = next(batches, None)
        with contextlib.suppress(AttributeError):  # optional in iterators
            batches.close()
    finally:
        RandomState().set_state(before)
    if batch is None:
        return []
    size = adapter.partial_batch_size
    if size is None:
        return [batch]
    return [batch, jax.tree.map(lambda array: array[:size], batch, is_leaf=is_sparse)]


def _compile(model: Any, batches: Sequence[Any]) -> None:
    """Compiles the step of training for the expected number of members."""
    if isinstance(model.train_function, TrainOrTestFunction):
        for batch in batches:
            model.train_function.compile_ahead(batch)
