"""Steps with remote variables: fetch values, run the program, push gradients and writes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from stratagem.execution.programs.offloaded_step import rows_of_table
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.remote_state import (
    BatchShare,
    Ids,
    Summand,
    UpdatedValue,
    WholeInput,
)
from stratagem.parameter_server.client.row_requests import DistinctKeys
from stratagem.parameter_server.client.shard_layout import KeyLayout, ShardLayout
from stratagem.parameter_server.client.variable_client import (
    Assigned,
    Gradient,
    IsFinite,
    OptimizerScalar,
    RowGradient,
    Scalar,
    Stored,
    VariableClient,
    name_of,
)
from stratagem.parameter_server.server.changes import LostUpdates
from stratagem.parameter_server.server.shards import aligned_empty, distinct, sum_rows
from stratagem.variables.layouts import is_keyed, is_remote

if TYPE_CHECKING:
    import keras


# Keys of a step: the distinct ones of all lookups in a table, and the place of each id in them.


def as_keys(pairs: np.ndarray) -> np.ndarray:
    """Returns int64 keys of shape (...), from pairs of uint32 of shape (..., 2), low half first."""
    halves = np.ascontiguousarray(pairs, np.dtype("<u4"))
    return halves.view(np.dtype("<i8")).reshape(pairs.shape[:-1])


class StepKeys:
    """Distinct keys of one step's lookups in one table.

    Args:
        lookups: keys of each lookup, as pairs of uint32 of shape (..., 2).
        skips_zero: True if the key 0 is padding.
        layout: layout of the table, by whose shards the keys are ordered; None for no order.

    Attributes:
        keys: distinct keys, of shape (n,) and dtype int64.
        places: position in `keys` of each key of each lookup; -1 for padding.
        distinct: the keys to request and to push.
    """

    def __init__(
        self,
        lookups: Sequence[np.ndarray],
        *,
        skips_zero: bool = False,
        layout: ShardLayout | None = None,
    ) -> None:
        own = [as_keys(one) for one in lookups]
        flat = [one.reshape(-1) for one in own]
        keys = flat[0] if len(flat) == 1 else np.concatenate(flat)
        found, places = distinct(keys)
        kept = np.flatnonzero(found != 0) if skips_zero else np.arange(len(found))
        self.distinct: DistinctKeys | np.ndarray = found[kept]
        if layout is not None:
            self.distinct, order = DistinctKeys.ordered(layout, found[kept])
            kept = kept[order]
        self.keys = found[kept]
        numbers = np.full(len(found), -1, np.int32)
        numbers[kept] = np.arange(len(kept), dtype=np.int32)
        places = numbers[places]
        self._skips_zero = skips_zero
        ends = np.cumsum([len(one) for one in flat])[:-1]
        self.places = [
            part.reshape(one.shape) for part, one in zip(np.split(places, ends), own, strict=True)
        ]

    def add(self, pairs: np.ndarray) -> np.ndarray:
        """Returns the places of more keys, and keeps the places of the others."""
        keys = as_keys(pairs)
        new = np.setdiff1d(keys, self.keys)
        self.keys = np.concatenate([self.keys, new[new != 0] if self._skips_zero else new])
        self.distinct = self.keys
        order = np.argsort(self.keys)
        places = np.searchsorted(self.keys, keys, sorter=order)
        places = np.append(order, -1)[np.minimum(places, len(order))].astype(np.int32)
        if self._skips_zero:
            places[keys == 0] = -1
        return places

    def rows(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns a row for each place, from rows of the distinct keys; zeros for padding."""
        shape = (*places.shape, *rows.shape[1:])
        if not len(rows):
            return np.zeros(shape, rows.dtype)
        out = aligned_empty(shape, rows.dtype)
        # "clip" writes directly to `out`.
        np.take(rows, places, axis=0, out=out, mode="clip")
        if self._skips_zero:
            out[places < 0] = 0
        return out

    def gradients(
        self, places: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray | DistinctKeys, np.ndarray]:
        """Returns distinct keys and the sums of their gradients, from gradients of places.

        Places that are no position in `keys` are left out: those of padding, and those that a sum
        over equal places has left unused.
        """
        is_key = (places >= 0) & (places < len(self.keys))
        if not is_key.all():
            places, rows = places[is_key], rows[is_key]
        sums = sum_rows(places, len(self.keys), rows)
        is_pushed = np.zeros(len(self.keys), np.bool_)
        is_pushed[places] = True
        if is_pushed.all():
            return self.distinct, sums
        return self.keys[is_pushed], sums[is_pushed]


# Maximum age of values from the last push with which a step may begin.
_FRESH_S = 0.05


@dataclasses.dataclass
class Gradients:
    """Gradients of one push, at most one per variable, and values `assigned` before, with signs."""

    whole: dict[str, np.ndarray] = dataclasses.field(default_factory=dict[str, np.ndarray])
    rows: dict[str, tuple[Any, np.ndarray]] = dataclasses.field(
        default_factory=dict[str, tuple[Any, np.ndarray]]
    )
    scalars: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    optimizers: dict[str, str] = dataclasses.field(default_factory=dict[str, str])
    assigned: dict[str, tuple[np.ndarray, int]] = dataclasses.field(
        default_factory=dict[str, tuple[np.ndarray, int]]
    )


class RemoteSteps:
    """Runs steps of one process; see `stratagem.execution.RemoteState`.

    `repeats_stale` reruns a step with new values if its gradients came too late. `is_alone` means
    that no other process changes the variables: a step's writes are then sent as values, never as
    differences.

    `keras` is the variables' `ServerKeras`. `lost_updates` checks for lost updates after each step;
    None if another object does. `gradient_weight` is the step's fraction of a batch that workers
    share, if this one `shares_batches`. `counts_from_zero` is True in a worker whose metrics a
    coordinator adds up.
    """

    gradient_weight = 1.0
    shares_batches = False
    counts_from_zero = False
    lost_updates: LostUpdates | None = None

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
        is_sending = any(not isinstance(what, Ids | Summand) for what in trace.sent)
        return is_sending or any(map(is_remote, trace.variables))

    def updates_after_step(self, variable: keras.Variable, sent: Sequence[Any]) -> bool:
        """Returns True if servers update the variable from the step's gradients."""
        return is_remote(variable) and any(not isinstance(what, Ids | Summand) for what in sent)

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
        early: Callable[[int, int, list[Any]], list[Any]],
    ) -> None:
        """Runs one step."""
        own = [one for one in trace.written if not is_remote(one)]
        num_used = 0  # of the sent values; a rerun sends only the later ones
        while True:
            # A rerun must not count twice, and the program donates these arrays.
            previous = [np.array(one.storage) for one in own] if self._repeats_stale else []
            num_used, is_used = self._run_once(trace, ids_of, call, early, num_used)
            if is_used or not self._repeats_stale:
                break
            for variable, value in zip(own, previous, strict=True):
                variable.storage = value
        if self.lost_updates is not None:
            self.lost_updates.note(self.variables.client.losses)

    def _run_once(
        self,
        trace: Trace,
        ids_of: Callable[[], list[Any]],
        call: Callable[[list[Any]], list[Any]],
        early: Callable[[int, int, list[Any]], list[Any]],
        num_used: int,
    ) -> tuple[int, bool]:
        """Runs the step, of which the servers have used `num_used` sent values.

        Returns the new number, and True if all of its gradients were used.
        """
        updated = [one.table for one in trace.lookups if isinstance(one, UpdatedValue)]
        remote = [one for one in (*trace.read_only, *trace.written, *updated) if is_remote(one)]
        variables = [*{id(one): one for one in remote}.values()]
        # Only training may begin with values from a moment ago.
        is_training = any(not isinstance(what, Ids | Summand) for what in trace.sent)
        before = self._pull(variables, may_be_brought=is_training and not num_used)
        # A table that is read whole is too large to return with every push.
        names = [
            name_of(one) for one in variables if isinstance(one.place, Stored) and not one.has_rows
        ]
        with self._values(variables, before):
            ids = ids_of() if trace.lookups else []
            rows = self._pull_rows(trace, ids, before)
            for stage in trace.stages:
                if stage <= num_used:
                    continue
                sent = trace.sent[num_used:stage]
                arrays = self._arrays(early(num_used, stage, _flat(rows)))
                if not self._push(sent, arrays, names) and self._repeats_stale:
                    return num_used, False
                for place, total in self._sums(trace, sent, arrays, num_used).items():
                    rows[place] = self._on_replicas(total)
                num_used = stage
                self._renew(trace, ids, rows, before, stage)
            sent = call(_flat(rows))
            after = {id(one): one.whole_held() for one in trace.written if is_remote(one)}
        last = trace.after_sending(num_used).sent if num_used else trace.sent
        shared = self._shared_writes(trace, last, before, after)
        if not self._push(last, self._arrays(sent), names, shared):
            return num_used, False
        written = [one for one in variables if id(one) in after]
        rest = [one for one in written if getattr(one.place, "name", None) not in shared]
        self._change(trace, rest, before, after)
        return num_used, True

    def _shared_writes(
        self,
        trace: Trace,
        sent: Sequence[Any],
        before: Mapping[int, Any],
        after: Mapping[int, Any],
    ) -> dict[str, tuple[np.ndarray, int]]:
        """Returns by name what workers that share a batch set together, with the gradients `sent`.

        The servers set the mean over workers: of averages such as those of batch normalization, by
        examples; of all else, which is the same on all workers. Sums over replicas are not among
        them.
        """
        if not self.shares_batches or not any(map(_is_gradient, sent)):
            return {}
        trained = {id(one) for one in _trained(trace)}
        mode, writes = self.variables.mode, dict[str, tuple[np.ndarray, int]]()
        for variable in filter(is_remote, trace.written):
            is_stored = isinstance(variable.place, Stored) and not variable.has_rows
            if not is_stored or id(variable) in trained or variable.aggregation == "sum":
                continue
            new, old = np.asarray(after[id(variable)]), np.asarray(before[id(variable)])
            if variable.aggregation == "mean" and new.dtype.kind not in "iub":
                share = self.gradient_weight * mode.num_needed
                new = (old + (new - old) * np.asarray(share, new.dtype)).astype(new.dtype)
            writes[name_of(variable)] = new, 0
        return writes

    def _sums(
        self, trace: Trace, sent: Sequence[Any], arrays: Sequence[np.ndarray], first: int
    ) -> dict[int, np.ndarray]:
        """Returns the sums over workers that a stage asks for, by place of the lookup.

        `first` tells this stage of the step from others.
        """
        own = {
            what.lookup: array
            for what, array in zip(sent, arrays, strict=True)
            if isinstance(what, Summand)
        }
        trained = _trained(trace)
        if not own or not trained or self.variables.mode.num_needed < 2:
            return own
        joined = np.concatenate([array.ravel() for array in own.values()])
        dense = [one for one in trained if not one.has_rows]
        total = self.variables.client.sum_over_workers(
            name_of((dense or trained)[0]), joined * bool(self.gradient_weight), first
        )
        ends = np.cumsum([array.size for array in own.values()])[:-1]
        parts = zip(own.items(), np.split(total, ends), strict=True)
        return {place: part.reshape(array.shape) for (place, array), part in parts}

    def _renew(
        self,
        trace: Trace,
        ids: list[Any],
        rows: list[list[Any]],
        before: dict[int, Any],
        stage: int,
    ) -> None:
        """Fetches what the step reads of the servers' updates from its first `stage` values."""
        places = [place for place, one in enumerate(trace.lookups) if one.after == stage]
        values = [place for place in places if isinstance(trace.lookups[place], UpdatedValue)]
        before |= self._pull([trace.lookups[place].table for place in values], may_be_brought=True)
        if any(not isinstance(trace.lookups[place], WholeInput) for place in places):
            again = self._pull_rows(trace, ids, before)
            for place in places:
                if not isinstance(trace.lookups[place], WholeInput):
                    rows[place] = again[place]
        for place in values:
            rows[place] = self._on_replicas(before[id(trace.lookups[place].table)])

    def _on_replicas(self, value: Any) -> list[Any]:
        """Returns a value as the input of each replica."""
        value, count = np.asarray(value), self._num_replicas
        return [np.broadcast_to(value, (count, *value.shape)) if count > 1 else value]

    def _arrays(self, sent: Sequence[Any]) -> list[np.ndarray]:
        arrays = [np.asarray(value) for value in sent]
        return [array[0] for array in arrays] if self._num_replicas > 1 else arrays  # all equal

    def _pull(self, variables: Sequence[Any], *, may_be_brought: bool) -> dict[int, Any]:
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

    def _pull_rows(
        self, trace: Trace, ids: list[Any], values: Mapping[int, Any]
    ) -> list[list[Any]]:
        """Returns the inputs of each lookup; those of remote tables come with one request.

        `values` has those of variables that the step reads again, by identity.
        """
        client = self.variables.client
        inputs: list[list[Any]] = []
        wanted: dict[int, tuple[str, np.ndarray]] = {}
        keys: dict[str, list[tuple[int, np.ndarray]]] = defaultdict(list)
        for place, (lookup, own_ids) in enumerate(zip(trace.lookups, ids, strict=True)):
            inputs.append([])
            if isinstance(lookup, UpdatedValue):
                inputs[place] = self._on_replicas(values[id(lookup.table)])
            elif isinstance(lookup, BatchShare):
                inputs[place] = self._on_replicas(np.float32(self.gradient_weight))
            elif isinstance(lookup, WholeInput):  # a sum that is not known yet
                inputs[place] = lookup.zeros(self._num_replicas)
            elif not is_remote(lookup.table):
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
        found = client.pull_rows_of(requests)
        for place, rows in zip(wanted, found, strict=False):
            inputs[place] = [rows]
        for (name, step_keys), rows in zip(self._keys.items(), found[len(wanted) :], strict=True):
            for (place, _), places in zip(keys[name], step_keys.places, strict=True):
                inputs[place] = [step_keys.rows(rows, places), places]
        return inputs

    def rows_of_keys(
        self, table: Any, pairs: np.ndarray, *, is_trained: bool
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
        self,
        sent: Sequence[Any],
        arrays: Sequence[np.ndarray],
        names: Sequence[str],
        assigned: Mapping[str, tuple[np.ndarray, int]] | None = None,
    ) -> bool:
        """Pushes gradients, one update per variable at a time; returns True if all were used.

        The first update also sets what is `assigned`.
        """
        batch, ids = Gradients(assigned=dict(assigned or {})), dict[str, np.ndarray]()
        are_used = True
        for what, array in self._usable(sent, arrays):
            if batch.optimizers and _is_of_another_call(what, batch):
                are_used &= self.variables.push([], **vars(batch)).is_used
                batch = Gradients(scalars=batch.scalars if _is_gradient(what) else {})
            if isinstance(what, OptimizerScalar):
                batch.scalars[what.name] = array.item()
            elif isinstance(what, Assigned) and isinstance(what.variable.place, Scalar):
                batch.scalars[name_of(what.variable)] = array.item()
            elif isinstance(what, Assigned):
                batch.assigned[name_of(what.variable)] = array, int(what.is_added)
            else:
                self._add_gradient(batch, ids, what, array)
        if batch.optimizers:
            pushed = self.variables.push(names, **vars(batch))
            are_used &= pushed.is_used
            if pushed.is_used:
                self._loaded, self._brought_s = pushed.values, time.monotonic()
                self._brought_writes = self.variables.num_writes
        return are_used

    def _usable(
        self, sent: Sequence[Any], arrays: Sequence[np.ndarray]
    ) -> Generator[tuple[Any, np.ndarray]]:
        """Yields what servers use, without gradients that are not finite for a loss scale."""
        skipped = set[str]()
        for what, array in zip(sent, arrays, strict=True):
            if isinstance(what, Ids | Summand):
                continue
            if isinstance(what, IsFinite):
                (skipped.discard if array else skipped.add)(what.optimizer)
            elif isinstance(what, OptimizerScalar) or what.optimizer not in skipped:
                yield what, array
            elif isinstance(what, Assigned):  # without an update
                self.variables.assign(what.variable, array, sign=int(what.is_added))

    def _add_gradient(
        self,
        batch: Gradients,
        ids: dict[str, np.ndarray],
        what: Gradient | RowGradient,
        array: np.ndarray,
    ) -> None:
        if isinstance(what, RowGradient) and what.is_ids:
            ids[name_of(what.table)] = array
            return
        if self.gradient_weight != 1:
            array = array * np.asarray(self.gradient_weight, array.dtype)
        if isinstance(what, Gradient):
            name = name_of(what.variable)
            batch.whole[name] = array
        else:
            name = name_of(what.table)
            keys = self._keys.get(name)  # a step has places of keys
            own_ids = ids[name]
            batch.rows[name] = (own_ids, array) if keys is None else keys.gradients(own_ids, array)
        batch.optimizers[name] = what.optimizer

    def _change(
        self,
        trace: Trace,
        variables: Sequence[Any],
        before: Mapping[int, Any],
        after: Mapping[int, Any],
    ) -> None:
        """Sends the step's own writes, as differences or as new values."""
        if variables:
            self.forget()
        # Synchronous workers write the same to weights that they have just updated together.
        trained = {id(one) for one in _trained(trace)} if self.is_synchronous else set[int]()
        for variable in variables:
            new = after[id(variable)]
            is_added_to = variable.is_added_to or id(variable) in trace.added_to
            if is_added_to and not self._is_alone and id(variable) not in trained:
                self.variables.assign(variable, new - before[id(variable)], sign=1)
            else:
                self.variables.assign(variable, new)

    @contextlib.contextmanager
    def _values(self, variables: Sequence[Any], values: Mapping[int, Any]) -> Generator[None]:
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


def _flat(inputs: Sequence[list[Any]]) -> list[Any]:
    return [one for own in inputs for one in own]


def _is_of_another_call(what: Any, batch: Gradients) -> bool:
    """Returns True for a second optimizer of a variable, or a second call of one."""
    if isinstance(what, OptimizerScalar):
        return what.name in batch.scalars
    if isinstance(what, Assigned):
        return True
    return name_of(what.variable if isinstance(what, Gradient) else what.table) in batch.optimizers


def _is_gradient(what: object) -> bool:
    return isinstance(what, Gradient | RowGradient)


def _trained(trace: Trace) -> list[Any]:
    """Returns the variables whose gradients a step sends."""
    gradients = [what for what in trace.sent if _is_gradient(what)]
    return [what.variable if isinstance(what, Gradient) else what.table for what in gradients]
