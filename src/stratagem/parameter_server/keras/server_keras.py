"""Keras classes and functions of parameter servers, used by `stratagem.keras`."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from stratagem.keras.training.dataset_creator import DatasetCreator
from stratagem.keras.variables.annotations import keyed_table_options
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.keras.variables.variable_source import VariableRequest
from stratagem.parameter_server.keras.fit import RemotePredictFunction, RemoteTrainOrTestFunction
from stratagem.parameter_server.keras.hybrid_update import apply_in_parts
from stratagem.parameter_server.keras.keyed_variable import KeyedVariable
from stratagem.parameter_server.keras.optimizer import create_slot, note_built, send_gradients
from stratagem.parameter_server.keras.variable import (
    ParameterServerVariable,
    ShardedParameterServerVariable,
    class_of_slot,
)
from stratagem.parameter_server.keras.worker_data import WorkerData

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy
    from stratagem.strategies.placement_rules import PlacementRules


class ServerKeras:
    """Implements `RemoteKeras` of `stratagem.keras.training` for parameter servers."""

    create_slot = staticmethod(create_slot)
    note_built = staticmethod(note_built)
    send_gradients = staticmethod(send_gradients)
    apply_in_parts = staticmethod(apply_in_parts)
    train_or_test_function = RemoteTrainOrTestFunction
    predict_function = RemotePredictFunction

    def variable_class(
        self, request: VariableRequest, strategy: Strategy
    ) -> type[DistributedVariable]:
        """Returns the class of a new variable."""
        if (kind := class_of_slot()) is not None:
            return kind
        placement = strategy.placement
        if keyed_table_options() is not None:
            if not placement.is_remote:  # the rule that matches its path is in use
                cast("PlacementRules", placement).is_on_servers(request)
            return KeyedVariable
        if not placement.is_remote:
            # A counter or a learning rate stays in this process, which sends it to the servers.
            is_local = request.has_components or request.is_slot
            if is_local or not (request.trainable or request.shape):
                return DistributedVariable
            if not cast("PlacementRules", placement).is_on_servers(request):
                return DistributedVariable
        is_split = placement.remote.variables.splits(request.path, request.shape, request.dtype)
        return ShardedParameterServerVariable if is_split else ParameterServerVariable

    def worker_data(
        self,
        strategy: Strategy,
        creator: DatasetCreator,
        name: str,
        steps: object,
        *,
        is_training: bool,
    ) -> WorkerData:
        """Returns data created by workers; a synchronous training step takes a batch of each."""
        adds_up = is_training and strategy.placement.remote.is_synchronous
        return WorkerData(strategy, creator, name, steps, adds_up=adds_up)
