"""Steps with remote variables: fetch values, run the program, push gradients and writes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from stratagem.execution import Ids, Trace, rows_of_table
from stratagem.parameter_server.client.distinct_rows import DistinctKeys
from stratagem.parameter_server.client.local_training import LocalTraining
from stratagem.parameter_server.client.lost_updates import LostUpdates
from stratagem.parameter_server.client.remote_values import (
    Gradient,
    OptimizerScalar,
    RemoteVariable,
    RowGradient,
    Scalar,
    Stored,
    name_of,
)
from stratagem.parameter_server.client.step_keys import StepKeys
from stratagem.parameter_server.client.variable_client import VariableClient
from stratagem.parameter_server.server.updates import Pushed
from stratagem.variables import is_keyed, is_remote

if TYPE_CHECKING:
    import keras

    from stratagem.parameter_server.client.key_layout import KeyLayout


__all__ = ["Gradients", "RemoteSteps"]

# Maximum age of values from the last push with which a step may begin.
_FRESH_S = 0.05


@dataclasses.dataclass
class Gradients:
    """Gradients of one push: at most one per variable."""

    whole: dict[str, np.ndarray] = dataclasses.field(default_factory=dict[str, np.ndarray])
    rows: dict[str, tuple[Any, np.ndarray]] = dataclasses.field(
        default_factory=dict[str, tuple[Any, np.ndarray]]
    )
    scalars: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    optimizers: dict[str, str] = dataclasses.field(default_factory=dict[str, str])


class RemoteSteps:
    """Runs steps of one process; see `stratagem.execution.RemoteState`.

    `repeats_stale` reruns a step with new values if its gradients came too late. `is_alone` means
    that no other process changes the variables: a step's writes are then sent as values, never as
    differences.

    `local` has the worker's own weights if it trains for several steps between synchronizations.

    `keras` is the variables' `RemoteKeras`. `lost_updates` checks for lost updates after each step;
    None if another object does. `gradient_weight` is the step's fraction of a batch that workers
    share. `counts_from_zero` is True in a worker whose metrics a coordinator adds up.
    """

    gradient_weight = 1.0
    counts_from_zero = False
    lost_updates: LostUpdates | None = None
    local: LocalTraining | None = None

    def __init__(
        self,
        variables: VariableClient,
        num_replicas: int,
        *,
        keras: object = None,
        repeats_stale: bool = False,
        is_alone: bool = False,
    ) -> None:
        self.variables = variables
        self.keras = keras
        self._num_replicas = num_replicas
        self._repeats_stale = repeats_stale
        self._is_alone = is_alone
        self._loaded: Mapping[str, np.ndarray] = {}
        self._keys: dict[str, StepKeys] = {}  # of the current step, by table
        self._brought_s = 0.0
        self._brought_writes = 0

    @property
    def is_synchronous(self) -> bool:
        """True if an update waits for gradients of several workers."""
        return self.variables.mode.num_needed > 0

    def holds(self, trace: Trace) -> bool:
        """Returns True if a step reads or changes remote variables."""
        tables = (one.table for one in trace.lookups)
        is_sending = any(not isinstance(what, Ids) for what in trace.sent)
        return is_sending or any(map(is_remote, (*trace.read_only, *trace.written, *tables)))

    def updates_after_step(self, variable: keras.Variable, sent: Sequence[Any]) -> bool:
        """Returns True if servers update the variable from the step's gradients."""
        return is_remote(variable) and any(not isinstance(what, Ids) for what in sent)

    def send(self, sent: Sequence[tuple[Any, Any]]) -> None:
        """Pushes the gradients of an eager step."""
        self._push([what for what, _ in sent], [np.asarray(value) for _, value in sent], [])
        self._keys = {}

    def forget(self) -> None:
        """Makes the next step fetch all values, after a change by another process."""
        self._loaded = {}

    def run(
        self,
        trace: Trace,
        ids_of: Callable[[], list[Any]],
        call: Callable[[list[Any]], list[Any]],
    ) -> None:
        """Runs one step."""
        own = [one for one in trace.written if not is_remote(one)]
        while True:
            # A rerun must not count twice, and the program donates these arrays.
            previous = [np.array(one.storage) for one in own] if self._repeats_stale else []
            if self._run_once(trace, ids_of, call) or not self._repeats_stale:
                break
            self.variables.client.rows.drop_cached()
            for variable, value in zip(own, previous, strict=True):
                variable.storage = value
        if self.lost_updates is not None:
            self.lost_updates.note(self.variables.client.losses)

    def _run_once(
        self,
        trace: Trace,
        ids_of: Callable[[], list[Any]],
        call: Callable[[list[Any]], list[Any]],
    ) -> bool:
        """Runs the step; returns True if its gradients were used."""
        variables = [one for one in (*trace.read_only, *trace.written) if is_remote(one)]
        # Only training may begin with values from a moment ago.
        is_training = any(not isinstance(what, Ids) for what in trace.sent)
        before = self._pull(variables, may_be_brought=is_training)
        with self._values(variables, before):
            ids = ids_of() if trace.lookups else []
            rows = self._pull_rows(trace, ids, may_be_cached=is_training)
            sent = call(rows)
            after = {id(one): one.whole_held() for one in trace.written if is_remote(one)}
        # A table that is read whole is too large to return with every push.
        names = [
            name_of(one) for one in variables if isinstance(one.place, Stored) and not one.has_rows
        ]
        arrays = [np.asarray(value) for value in sent]
        if self._num_replicas > 1:  # equal on all replicas
            arrays = [array[0] for array in arrays]
        if not self._push(trace.sent, arrays, names):
            return False
        self._change(trace, [one for one in variables if id(one) in after], before, after)
        return True

    def _pull(self, variables: Sequence[RemoteVariable], *, may_be_brought: bool) -> dict[int, Any]:
        """Returns the values of variables, by identity."""
        for variable in variables:
            self.variables.place(variable)
        client = self.variables
        stored = [one for one in variables if isinstance(one.place, Stored) and not is_keyed(one)]
        names = [name_of(one) for one in stored]
        values, self._loaded = self._loaded, {}
        is_fresh = may_be_brought and time.monotonic() - self._brought_s < _FRESH_S
        is_fresh &= client.num_writes == self._brought_writes
        if client.is_caching or not (is_fresh and all(name in values for name in names)):
            values = client.pull(names) if names else {}
        scalars: Mapping[str, Any] = {}
        scalar_places = [one.place for one in variables if isinstance(one.place, Scalar)]
        if scalar_places:
            scalars = client.scalars(scalar_places[0].server)
        found = {
            id(one): np.zeros(one.shape, np.dtype(one.dtype)) for one in variables if is_keyed(one)
        }
        return found | {
            id(one): (values if isinstance(one.place, Stored) else scalars)[name_of(one)]
            for one in variables
            if id(one) not in found
        }

    def _pull_rows(self, trace: Trace, ids: list[Any], *, may_be_cached: bool) -> list[Any]:
        """Returns the inputs of all lookups; those of remote tables come with one request."""
        client = self.variables.client
        client.rows.begin_step()
        inputs: list[list[Any]] = []
        wanted: dict[int, tuple[str, np.ndarray]] = {}
        keys: dict[str, list[tuple[int, np.ndarray]]] = defaultdict(list)
        for place, (lookup, own_ids) in enumerate(zip(trace.lookups, ids, strict=True)):
            inputs.append([])
            if not is_remote(lookup.table):
                topology = lookup.table.distribute_strategy.topology
                inputs[place] = [rows_of_table(lookup, own_ids, topology)]
            elif own_ids is None:  # a lookup with no dependents
                inputs[place] = lookup.zeros(self._num_replicas)
            elif lookup.is_keyed:
                keys[name_of(lookup.table)].append((place, np.asarray(own_ids)))
            else:
                numbers = np.asarray(own_ids)
                numbers = np.where(numbers < 0, numbers + lookup.table.shape[0], numbers)
                wanted[place] = name_of(lookup.table), numbers
        self._keys = {
            name: StepKeys(
                [own for _, own in pairs],
                skips_zero=self._skips_zero(name),
                layout=client.placement_of(name),
            )
            for name, pairs in keys.items()
        }
        requests: list[tuple[str, np.ndarray | DistinctKeys]] = [*wanted.values()]
        requests += [(name, one.distinct) for name, one in self._keys.items()]
        found = client.pull_rows_of(requests, may_be_cached=may_be_cached)
        for place, rows in zip(wanted, found, strict=False):
            inputs[place] = [rows]
        for (name, step_keys), rows in zip(self._keys.items(), found[len(wanted) :], strict=True):
            for (place, _), places in zip(keys[name], step_keys.places, strict=True):
                inputs[place] = [step_keys.rows(rows, places), places]
        return [one for own in inputs for one in own]

    def rows_of_keys(
        self, table: RemoteVariable, pairs: np.ndarray, *, is_trained: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows of keys outside of compiled steps, and the places of their gradients.

        With `is_trained`, an eager step will send gradients for these places.
        """
        name = name_of(table)
        skips_zero = self._skips_zero(name)
        own = StepKeys([pairs], skips_zero=skips_zero)
        found = self.variables.client.pull_rows(name, own.keys)
        rows, places = own.rows(found, own.places[0]), own.places[0]
        if is_trained:
            nothing = StepKeys([pairs[:0].reshape(0, 2)], skips_zero=skips_zero)
            places = self._keys.setdefault(name, nothing).add(pairs)
        return rows, places

    def _skips_zero(self, name: str) -> bool:
        return cast("KeyLayout", self.variables.client.placement_of(name)).skips_zero

    def _push(
        self, sent: Sequence[Any], arrays: Sequence[np.ndarray], names: Sequence[str]
    ) -> bool:
        """Pushes gradients, one update per variable at a time; returns True if all were used."""
        batch, ids = Gradients(), dict[str, np.ndarray]()
        are_used = True
        for what, array in zip(sent, arrays, strict=True):
            if isinstance(what, Ids):
                continue
            if isinstance(what, OptimizerScalar):
                if what.name in batch.scalars and batch.optimizers:  # a second call
                    are_used &= self._push_some(batch, []).is_used
                    batch = Gradients()
                batch.scalars[what.name] = array.item()
                continue
            array = self._weighted(what, array)
            is_whole = isinstance(what, Gradient)
            name = name_of(what.variable if is_whole else what.table)
            if not is_whole and what.is_ids:
                ids[name] = array
                continue
            if name in batch.optimizers:  # a second optimizer, or a second call
                are_used &= self._push_some(batch, []).is_used
                batch = Gradients(scalars=batch.scalars)
            batch.optimizers[name] = what.optimizer
            if is_whole:
                batch.whole[name] = array
            else:
                batch.rows[name] = self._row_gradients(name, ids[name], array)
        if batch.optimizers:
            pushed = self._push_some(batch, names)
            are_used &= pushed.is_used
            if pushed.is_used:
                self._loaded, self._brought_s = pushed.values, time.monotonic()
                self._brought_writes = self.variables.num_writes
        return are_used

    def _row_gradients(
        self, name: str, ids: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray | DistinctKeys, np.ndarray]:
        """Returns ids or keys of a table, and their gradients; a step has places of keys."""
        step_keys = self._keys.get(name)
        return (ids, rows) if step_keys is None else step_keys.gradients(ids, rows)

    def _weighted(self, what: Gradient | RowGradient, array: np.ndarray) -> np.ndarray:
        is_gradient = isinstance(what, Gradient) or not what.is_ids
        if not is_gradient or self.gradient_weight == 1:
            return array
        return array * np.asarray(self.gradient_weight, array.dtype)

    def _push_some(self, batch: Gradients, names: Sequence[str]) -> Pushed:
        return self.variables.push(
            batch.whole,
            batch.rows,
            pull=names,
            optimizers=batch.optimizers,
            scalars=batch.scalars,
        )

    def _change(
        self,
        trace: Trace,
        variables: Sequence[RemoteVariable],
        before: Mapping[int, Any],
        after: Mapping[int, Any],
    ) -> None:
        """Sends the step's own writes, as differences or as new values."""
        if variables:
            self.forget()
        for variable in variables:
            new = after[id(variable)]
            is_added_to = variable.is_added_to or id(variable) in trace.added_to
            if is_added_to and not self._is_alone:
                self.variables.assign(variable, new - before[id(variable)], sign=1)
            else:
                self.variables.assign(variable, new)

    @contextlib.contextmanager
    def _values(
        self, variables: Sequence[RemoteVariable], values: Mapping[int, Any]
    ) -> Generator[None]:
        """Sets the values that variables return in a `with` block."""
        for variable in variables:
            variable.hold(values[id(variable)])
        self.variables.is_in_step = True
        try:
            yield
        finally:
            self.variables.is_in_step = False
            for variable in variables:
                variable.held = None
