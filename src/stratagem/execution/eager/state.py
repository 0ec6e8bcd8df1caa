"""Variables during eager execution: each replica's reads, and merging of the replicas' writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.mesh import Topology
from stratagem.devices.shards import replica_copy
from stratagem.execution.tracing.errors import disagreement, foreign_variable
from stratagem.execution.tracing.functionalize import ReplicaScope
from stratagem.group.current import current_group
from stratagem.variables.kind import VariableKind
from stratagem.variables.layouts import put_stored, require_layouts_used
from stratagem.variables.registry import home_of
from stratagem.variables.store import store_of

if TYPE_CHECKING:
    import keras

    from stratagem.contexts import StrategyParts


class EagerState:
    """Reads and writes of a strategy's variables by its eager replicas."""

    def __init__(self, strategy: StrategyParts) -> None:
        self._strategy = strategy
        self._topology: Topology = strategy.topology
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._before: dict[int, tuple[Any, Any]] = {}

    def reader(self, replica_id: int) -> Callable[[Any], Any]:
        """Returns a function that maps a variable to this replica's part of it."""

        def read(variable: keras.Variable) -> Any:
            home = home_of(variable)
            if home is None:
                return None
            if home.strategy is not self._strategy:
                raise foreign_variable(variable, home.strategy, self._strategy)
            stored = self._stored(variable) if variable.has_value else None
            if stored is None:
                return None
            if not isinstance(stored, jax.Array):  # fetched from another process
                return jnp.asarray(stored)
            if home.kind is VariableKind.PLAIN and self._topology.groups is None:
                return stored
            part = replica_copy(stored, self._topology, replica_id)
            return part[0] if home.kind is VariableKind.ON_READ else part

        return read

    def _stored(self, variable: keras.Variable) -> Any:
        """Returns a copy for each replica; offloaded values are copied once per value."""
        if store_of(variable) is None:
            return variable.storage
        copied, copies = self._copies.get(id(variable), (None, None))
        if copied is not variable.stored:
            copies = variable.storage
            self._copies[id(variable)] = (variable.stored, copies)
        return copies

    def keep(self, scopes: list[ReplicaScope]) -> None:
        """Moves the writes of all replicas, in order, into the variables and clears the scopes."""
        written: dict[int, Any] = {}
        for scope in scopes:
            written.update(scope.writes)
        require_layouts_used(self._strategy.placement.layouts, written.values())
        for key, variable in written.items():
            home = home_of(variable)
            if home is not None and home.strategy is not self._strategy:
                raise foreign_variable(variable, home.strategy, self._strategy)
            if home is not None and not variable.has_value:
                continue  # created in this call, which will be rerun
            if key not in self._before:
                self._before[key] = variable, variable.value if home is None else variable.storage
            if home is not None and home.kind is VariableKind.ON_READ:
                self._keep_components(variable, scopes, key)
            else:
                self._keep_copy(variable, scopes, key, is_stored=home is not None)
        for scope in scopes:
            scope.forget()

    def restore(self) -> None:
        """Resets variables to their values before the call, which is about to be rerun."""
        for variable, value in self._before.values():
            if home_of(variable) is None:
                variable.assign(value)
            else:
                variable.storage = value

    def send(self, scope: ReplicaScope) -> None:
        """Sends one replica's outputs to the remote variables; they are equal on all replicas."""
        for prepare in scope.preparations:
            prepare()
        if scope.sent:
            self._strategy.placement.remote.send(scope.sent)

    def _keep_components(
        self, variable: keras.Variable, scopes: list[ReplicaScope], key: int
    ) -> None:
        parts = [
            scope.state_mapping[key]
            if key in scope.writes
            else replica_copy(variable.storage, self._topology, index)[0]
            for index, scope in zip(self._topology.local_replica_ids, scopes, strict=True)
        ]
        variable.storage = self._topology.stack(
            [jnp.asarray(part, variable.dtype) for part in parts]
        )

    def _same_everywhere(self, value: object, same: bool) -> bool:
        """Returns True if the replicas of all processes agree; `same` is the local answer."""
        if not self._topology.spans_processes:
            return same
        group = current_group()
        assert group is not None
        received = group.exchange("an assigned value", (same, np.asarray(value)))
        return all(
            theirs and np.array_equal(received[0][1], v, equal_nan=True) for theirs, v in received
        )

    def _keep_copy(
        self, variable: Any, scopes: list[ReplicaScope], key: int, *, is_stored: bool
    ) -> None:
        values = [scope.state_mapping.get(key) if key in scope.writes else None for scope in scopes]
        first = values[0] if values[0] is not None else next(v for v in values if v is not None)
        if any(key in scope.unproven for scope in scopes):
            same = all(
                value is not None
                and np.array_equal(np.asarray(first), np.asarray(value), equal_nan=True)
                for value in values
            )
            if not self._same_everywhere(first, same):
                raise disagreement(variable, self._strategy)
        value = jnp.asarray(first, variable.dtype)
        if is_stored:
            variable.storage = put_stored(variable, jax.device_get(value), self._topology)
        else:
            variable.assign(value)
