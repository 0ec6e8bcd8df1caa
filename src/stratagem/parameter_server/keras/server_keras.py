"""Keras classes and functions of parameter servers, used by `stratagem.keras`."""

from __future__ import annotations

from typing import Any

from stratagem.keras.training.dataset_creator import DatasetCreator
from stratagem.parameter_server.keras.fit import RemotePredictFunction, RemoteTrainOrTestFunction
from stratagem.parameter_server.keras.hybrid_update import apply_in_parts
from stratagem.parameter_server.keras.optimizer import create_slot, note_built, send_gradients
from stratagem.parameter_server.keras.placed_variable import PlacedVariable
from stratagem.parameter_server.keras.variable import ParameterServerVariable, is_making_slot
from stratagem.parameter_server.keras.worker_data import WorkerData

__all__ = ["ServerKeras"]


class ServerKeras:
    """Implements `RemoteKeras` of `stratagem.keras.training` for parameter servers."""

    create_slot = staticmethod(create_slot)
    note_built = staticmethod(note_built)
    send_gradients = staticmethod(send_gradients)
    apply_in_parts = staticmethod(apply_in_parts)
    train_or_test_function = RemoteTrainOrTestFunction
    predict_function = RemotePredictFunction

    def variable_class(self, *, is_all_remote: bool) -> type:
        """Returns the class of a new variable."""
        return ParameterServerVariable if is_all_remote or is_making_slot() else PlacedVariable

    def worker_data(
        self, strategy: Any, creator: DatasetCreator, name: str, steps: Any, *, is_training: bool
    ) -> WorkerData:
        """Returns data created by workers; a synchronous training step takes a batch of each."""
        adds_up = is_training and strategy.placement.remote.is_synchronous
        return WorkerData(strategy, creator, name, steps, adds_up=adds_up)
