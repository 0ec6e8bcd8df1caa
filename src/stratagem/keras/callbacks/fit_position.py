"""Position of a `fit`: epoch, batch, data, random state, and the states of callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.keras.callbacks.callback_state import callback_states, set_callback_states
from stratagem.keras.callbacks.data_position import DataPosition
from stratagem.keras.numerics.random_state import Draws, RandomState
from stratagem.keras.private.trainers import set_initial_epoch


class FitPosition:
    """Position of one `fit`, which another process can continue from.

    `callbacks` are those whose states belong to it.
    """

    def __init__(self, data: DataPosition, callbacks: Sequence[Any]) -> None:
        self.data = data
        self._callbacks = callbacks

    def state(self, model: Any, epoch: int, batch: int, *, is_within: bool) -> dict[str, Any]:
        """Returns the position as JSON, after `batch` batches of an epoch.

        `is_within` is False between epochs, where `batch` is 0.
        """
        now = Draws.now()
        return {
            "epoch": epoch,
            "batch": batch,
            "is_stopped": bool(model.stop_training),
            "data": self.data.state(batch, now, is_within=is_within),
            "random": RandomState.state_with(now),
            "callbacks": callback_states(self._callbacks),
        }

    def go_to(self, model: Any, num_epochs: int, state: Mapping[str, Any]) -> None:
        """Makes the active `fit` begin at a position; call it in `on_train_begin`."""
        # A training stopped by a callback has no epochs left.
        set_initial_epoch(model, num_epochs if state["is_stopped"] else state["epoch"])
        self.data.go_to(state["data"], state["batch"])
        self.set_state(state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the random state and the states of callbacks."""
        set_callback_states(self._callbacks, state["callbacks"])
        RandomState().set_state(state["random"])
