"""Steps of a worker that trains its own weights, and synchronizes with the servers in rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.remote_state import Ids
from stratagem.parameter_server.client.local_training import LocalTraining
from stratagem.parameter_server.client.remote_steps import Gradients, RemoteSteps
from stratagem.parameter_server.client.variable_client import (
    Gradient,
    RemoteVariable,
    RowGradient,
    Scalar,
    Stored,
    VariableClient,
    name_of,
)
from stratagem.parameter_server.server.updates import LocalRounds, Pushed


class LocalSteps(RemoteSteps):
    """Runs steps of one process: training on its own weights, all else on those of the servers.

    Tables whose rows are looked up stay on the servers, which update them in each step: a worker
    has no copy of a table.
    """

    def __init__(
        self,
        variables: VariableClient,
        num_replicas: int,
        rounds: LocalRounds,
        *,
        keras: object = None,
    ) -> None:
        super().__init__(variables, num_replicas, keras=keras)
        self.local = self._own = LocalTraining(variables, rounds)

    def run(
        self,
        trace: Trace,
        ids_of: Callable[[], list[Any]],
        call: Callable[[list[Any]], list[Any]],
        early: Callable[[int, int, list[Any]], list[Any]],
    ) -> None:
        """Runs one step, and synchronizes if it is the last one of a round."""
        super().run(trace, ids_of, call, early)
        if _trains(trace):
            self._own.end_step()

    def _pull(self, variables: Sequence[RemoteVariable], *, may_be_brought: bool) -> dict[int, Any]:
        if not may_be_brought:  # not a training step
            return super()._pull(variables, may_be_brought=False)
        for variable in variables:
            self.variables.place(variable)
        values = self._own.values([one for one in variables if _is_local(one)])
        others: list[RemoteVariable] = []
        for variable in variables:
            is_scalar = isinstance(variable.place, Scalar)
            scalar = self._own.scalar(name_of(variable)) if is_scalar else None
            if scalar is not None:
                values[id(variable)] = scalar
            elif not _is_local(variable):
                others.append(variable)
        return {**values, **super()._pull(others, may_be_brought=True)} if others else values

    def _weighted(self, what: Gradient | RowGradient, array: np.ndarray) -> np.ndarray:
        # A worker's loss is that of its own examples, however many these are.
        return array if self.gradient_weight else np.zeros_like(array)

    def _push_some(self, batch: Gradients, names: Sequence[str]) -> Pushed:
        own = {
            name: gradient
            for name, gradient in batch.whole.items()
            if not self.variables.client.placement_of(name).has_rows
        }
        self._own.assign(batch.assigned)
        self._own.update(own, batch.optimizers)
        optimizers = {name: one for name, one in batch.optimizers.items() if name not in own}
        if optimizers:
            whole = {name: one for name, one in batch.whole.items() if name not in own}
            others = dataclasses.replace(batch, whole=whole, optimizers=optimizers, assigned={})
            super()._push_some(others, [])
        return Pushed(is_used=True, num_discarded=0, version=0, values={})

    def _change(
        self,
        trace: Trace,
        variables: Sequence[RemoteVariable],
        before: Mapping[int, Any],
        after: Mapping[int, Any],
    ) -> None:
        is_local = _trains(trace)
        for variable in variables:
            if is_local and _is_local(variable):
                is_added = variable.is_added_to or id(variable) in trace.added_to
                key = id(variable)
                self._own.write(variable, before[key], after[key], is_added=is_added)
        others = [one for one in variables if not (is_local and _is_local(one))]
        super()._change(trace, others, before, after)


def _trains(trace: Trace) -> bool:
    return any(not isinstance(what, Ids) for what in trace.sent)


def _is_local(variable: RemoteVariable) -> bool:
    """Returns True for a variable whose training steps use a copy: no table, slot or scalar."""
    place = variable.place
    return isinstance(place, Stored) and ":" not in place.name and not variable.has_rows
