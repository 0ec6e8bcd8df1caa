"""State of the step that a thread traces or runs: the mode of its losses, and what it sums.

The modes make losses of replicas match the loss of one device.

SHARE: a replica's loss is its share of the loss of the global batch, so that losses and gradients
sum to the whole. Exact for masks and weights, because every divisor counts all replicas.

MEAN: a replica's loss is the mean over its own examples; gradients are averaged by the number of
true examples. For models with a custom `train_step` or `compute_loss`, which compute means. What is
known as a share, such as that of a Keras loss, is divided by the replica's fraction of the
examples, so that the average of the replicas is the sum of the shares.

WHOLE: this replica computes with the rows of all replicas, as one device does, without collectives.

OWN: a custom step (`strategy.run`); the user's code defines the loss.

Where the workers of parameter servers share each batch, this worker's gradients are multiplied by
its share of the batch, and added to those of the others. So its loss is that of its part, except
that the denominators of a mean are those of the whole batch, times the share.

Where replicas train apart, the global batch of a training step of `fit` is that of an island.

The terms of a step are its sums over rows and its means. A step of `fit` takes the average of its
replicas by examples, which is right for means over rows. The gradients, logs and numbers for
metrics that grow with the rows of a replica are sums: they are divided by the replica's fraction of
the examples first, so that the average is the sum of one device. Rows are counted in two traces:
with the rows of the batch, and with twice as many.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem import contexts as stack
from stratagem.errors import explain
from stratagem.execution.communicator import SoleCommunicator
from stratagem.execution.replica_context import ReplicaBatch, ReplicaContext, get_replica_context
from stratagem.execution.row_effects import MIXED, SUM_OVER_REPLICAS, row_degrees
from stratagem.execution.summary.collector import Collector
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope
from stratagem.execution.tracing.remote_state import BatchShare, Summand, SumOverWorkers
from stratagem.logs import warn_on_one_worker
from stratagem.options import ReduceOp
from stratagem.resources import setting

if TYPE_CHECKING:
    import keras
    from jax.extend.core import JaxprEqn
    from jax.typing import ArrayLike, DTypeLike


class StepMode(enum.Enum):
    """Loss modes; the module docstring describes them."""

    OWN = "own"
    SHARE = "share"
    MEAN = "mean"
    WHOLE = "whole"


@dataclasses.dataclass(frozen=True)
class StepState:
    """The step that this thread traces or runs: its loss mode, and what is under way in it."""

    mode: StepMode = StepMode.OWN
    loss_trackers: frozenset[int] = frozenset()  # ids of metrics that Keras updates with losses
    trains_apart: bool = False  # True in a training step of islands
    shares_batches: bool = False  # True for workers that share each batch
    is_in_loss: bool = False  # True within a loss: those in it count the rows that they get
    # Values of the terms of a step, while it is traced for these only; see `StepTerms`.
    recorded: list[list[Any]] | None = None
    terms: Iterator[tuple[list[bool], list[bool]]] | None = None
    reported: dict[int, Any] | None = None  # results of metrics for all replicas, as requested
    updates_metric: bool = False
    are_gradients_reduced: bool = False  # True if they are over replicas already
    is_recomputed: bool = False  # True in a call that is computed again in the backward pass


_OUTSIDE = StepState()
_state: ContextVar[StepState] = ContextVar("step")


def step_state() -> StepState:
    """Returns the state of this thread's step."""
    return _state.get(_OUTSIDE)


def in_step(**changes: Any) -> contextlib.AbstractContextManager[StepState]:
    """Changes fields of the state in a `with` block."""
    return setting(_state, dataclasses.replace(step_state(), **changes))


def step_mode(
    mode: StepMode,
    loss_trackers: Sequence[Any] = (),
    *,
    trains_apart: bool = False,
    shares_batches: bool = False,
) -> contextlib.AbstractContextManager[StepState]:
    """Sets the mode in a `with` block; `loss_trackers` are metrics, one per output."""
    return in_step(
        mode=mode,
        loss_trackers=frozenset(map(id, loss_trackers)),
        trains_apart=trains_apart,
        shares_batches=shares_batches,
    )


def taking_shares() -> contextlib.AbstractContextManager[StepState]:
    """Computes shares in a `with` block of MEAN mode."""
    return in_step(mode=StepMode.SHARE)


def calling_layers() -> contextlib.AbstractContextManager[StepState]:
    """Computes losses in layers as terms of an average: the step weights those of `add_loss`."""
    mode = current_mode()
    return in_step(mode=StepMode.MEAN if mode is StepMode.SHARE else mode)


def computing_loss() -> contextlib.AbstractContextManager[StepState]:
    """Makes losses within a loss, in a `with` block, those of one device that has these rows."""
    return in_step(is_in_loss=True)


def is_of_one_device() -> bool:
    """Returns True where a loss counts the rows that it is given, as on one device."""
    state = step_state()
    is_in_loss = state.is_in_loss and state.mode is not StepMode.OWN
    return is_in_loss or state.mode is StepMode.WHOLE


def is_loss_tracker(metric: object) -> bool:
    """Returns True if Keras updates a metric with this replica's share of the loss in this step."""
    return step_state().mode is StepMode.SHARE and id(metric) in step_state().loss_trackers


def record_loss(tracker: keras.metrics.Mean, loss: ArrayLike, context: ReplicaContext) -> None:
    """Adds a step's loss to its `Mean` metric, so that the result matches a single device.

    `loss` is this replica's share of the loss, or the mean over its own examples.
    """
    examples = jnp.asarray(context.num_examples, tracker.dtype)
    whole = context.island if step_state().trains_apart else context
    weight = whole.global_num_examples if step_state().mode is StepMode.SHARE else examples
    tracker.total.assign_add(jnp.asarray(loss, tracker.dtype) * jnp.asarray(weight, tracker.dtype))
    tracker.count.assign_add(examples)


def current_mode() -> StepMode:
    """Returns the mode of this thread."""
    return step_state().mode


def replica_context() -> ReplicaContext | None:
    """Returns the context of a replica among several or with a padded batch; else None."""
    if step_state().mode is StepMode.WHOLE:
        return None
    context = get_replica_context()
    if context is None or (context.num_replicas_in_sync == 1 and not context.batch.is_padded):
        return None
    return context


def shares_batches() -> bool:
    """Returns True if this worker computes a part of the batch, and other workers the rest."""
    return step_state().shares_batches and step_state().mode is not StepMode.WHOLE


def loss_context() -> ReplicaContext | None:
    """Returns what `lockstep_context` does, and also the sole replica of a worker in a batch."""
    return get_replica_context() if shares_batches() else lockstep_context()


def sum_over_workers(value: jax.Array) -> jax.Array:
    """Returns the sum over the workers that share a batch, times this worker's share.

    `value` is the same on all replicas of this worker; workers without rows do not count.
    """
    if not shares_batches():
        return value
    scope = current_scope()
    assert scope is not None
    receive = scope.outermost.receive
    assert receive is not None
    place, total = receive(SumOverWorkers(None, value.shape, jnp.dtype("float32")))
    scope.send(Summand(place), value.astype("float32"))
    return (total * _share()).astype(value.dtype)


def as_sum_over_workers(total: jax.Array) -> jax.Array:
    """Returns a sum over this worker's rows, for gradients that are multiplied by its share."""
    if not shares_batches():
        return total
    share = _share().astype(total.dtype)
    return jnp.where(share == 0, 0, total / jnp.where(share == 0, 1, share))


def batch_fraction(context: ReplicaContext, dtype: DTypeLike) -> Any:
    """Returns `example_fraction`, of the batch of all workers that share it."""
    fraction = example_fraction(context, dtype)
    return fraction * _share().astype(dtype) if shares_batches() else fraction


def _share() -> jax.Array:
    scope = current_scope()
    assert scope is not None
    receive = scope.outermost.receive
    assert receive is not None
    return receive(BatchShare(None, (), jnp.dtype("float32")))[1]


def lockstep_context() -> ReplicaContext | None:
    """Returns the context of the replicas that share a loss: in training, those of an island.

    None like `replica_context`.
    """
    context = replica_context()
    if context is None or not step_state().trains_apart:
        return context
    island = context.island
    return None if island.num_replicas_in_sync == 1 and not island.batch.is_padded else island


def example_fraction(context: ReplicaContext, dtype: DTypeLike) -> Any:
    """Returns this replica's fraction of the step's true examples, in a floating dtype.

    Without examples all replicas have the same fraction.
    """
    if context.batch.fraction is not None:
        return jnp.asarray(context.batch.fraction, dtype)
    equal = jnp.asarray(1.0 / context.num_replicas_in_sync, dtype)
    if not context.batch.is_padded or not context.batch.has_examples:
        return equal
    own = jnp.asarray(context.num_examples, dtype)
    total = jnp.asarray(context.global_num_examples, dtype)
    if not context.batch.choices:
        return own / total
    return jnp.where(total == 0, equal, own / jnp.maximum(total, 1))


def as_average(share: jax.Array, context: ReplicaContext) -> Any:
    """Returns the value whose average over replicas, by examples, is the sum of their shares."""
    fraction = example_fraction(context, share.dtype)
    return jnp.where(fraction == 0, 0, share / jnp.where(fraction == 0, 1, fraction))


# Code in these places handles the rows itself, or is not the user's.
_NOT_OF_USER = ("/jax/", "/keras/src/", "/jaxlib/")
_HANDLES_ROWS = "/stratagem/keras/numerics/"


@dataclasses.dataclass
class StepTerms:
    """Numbers of a step that grow with its rows, in the order in which the step averages them.

    `are_sums` are those that grow with the rows of a replica, `are_of_worker` those that grow with
    the rows of a worker that has a part of each batch. The two differ in a sum that is divided by
    `global_num_examples`, which counts the rows of the worker. `places` are the lines of the user
    that combine rows, padding included; `mixing` those whose result is no sum or mean, and
    `summed_means` those that add up means over replicas.
    """

    are_sums: list[list[bool]] = dataclasses.field(default_factory=list)
    are_of_worker: list[list[bool]] = dataclasses.field(default_factory=list)
    places: list[str] = dataclasses.field(default_factory=list)
    mixing: list[str] = dataclasses.field(default_factory=list)
    summed_means: list[str] = dataclasses.field(default_factory=list)
    has_mixed: bool = False

    @property
    def has_sums(self) -> bool:
        """True if a number grows with the rows, alone or added to one that does not."""
        return self.has_mixed or any(map(any, self.are_sums))

    def warn(self, name: str, context: ReplicaContext) -> None:
        """Warns once of what cannot be made the number of one device."""
        lengths = context.batch.lengths
        if self.has_mixed:
            self.has_mixed = False
            warn_on_one_worker(
                explain(
                    f"A loss in {name} adds a sum over rows to a number that does not grow with "
                    "the rows, such as a penalty.",
                    expected="a mean over rows, or a sum of its own: "
                    f"{context.num_replicas_in_sync} replicas take the average of their losses.",
                    fix="take the mean over rows, or use sg.compute_average_loss.",
                    code="SG409",
                ),
                stacklevel=2,
            )
        if self.mixing:
            mixing, self.mixing = self.mixing, []
            warn_on_one_worker(
                explain(
                    f"{name} computes a number from the rows of one replica at "
                    f"{', '.join(mixing)} that is no sum or mean over rows.",
                    expected="sums and means, of which "
                    f"{context.num_replicas_in_sync} replicas make those of all rows. The average "
                    "of other numbers is not that of one device.",
                    fix="use a Keras loss or metric, divide by a sum over all replicas, as of "
                    'weights: sg.get_replica_context().all_reduce("sum", weight), or compute with '
                    "the rows of all: sg.all_gather(value, axis=0).",
                    code="SG409",
                ),
                stacklevel=2,
            )
        if self.summed_means:
            summed, self.summed_means = self.summed_means, []
            count = context.num_replicas_in_sync
            warn_on_one_worker(
                explain(
                    f"{name} adds up a mean over rows over the replicas at {', '.join(summed)}.",
                    expected=f"a sum over rows: {count} means add up to {count} times the mean. In "
                    "a step of fit, sg.compute_average_loss returns a mean.",
                    fix="leave all_reduce out: the step averages gradients, logs and numbers for "
                    "metrics over replicas.",
                    code="SG409",
                ),
                stacklevel=2,
            )
        # Not mended by a branch for each number of rows, as in metrics: the replicas of a step have
        # to meet in its sums, and those in unlike branches would wait for one another for ever.
        if lengths is not None and len(set(lengths)) > 1 and self.places:
            places, self.places = self.places, []
            warn_on_one_worker(
                explain(
                    f"{name} combines the rows of a replica at {', '.join(places)}, and a batch "
                    f"has parts of {lengths} rows.",
                    expected="code that leaves out the padding of short parts: it counts as "
                    "further copies of the last row.",
                    fix="use a Keras loss or metric, sg.compute_average_loss, or "
                    "sg.get_replica_context().example_mask, which is True for real rows.",
                    code="SG409",
                ),
                stacklevel=2,
            )


def is_analyzing() -> bool:
    """Returns True while a step is traced for its terms only: nothing must be sent or updated."""
    return step_state().recorded is not None


def terms_of(values: Sequence[Any], context: ReplicaContext) -> list[Any]:
    """Returns values of a step of which it takes averages by examples: sums are scaled for that.

    Arrays, rows of gradients and None; the same each time that the step is traced.
    """
    state = step_state()
    if state.recorded is not None:
        leaves = [jax.tree.leaves(value) for value in values]
        state.recorded.append([each[0] for each in leaves if each])
        return list(values)
    if state.terms is None:
        return list(values)
    are_sums, are_of_worker = map(iter, next(state.terms, ([], [])))
    terms = list(values)
    for place, value in enumerate(terms):
        if not jax.tree.leaves(value):
            continue
        if next(are_of_worker, False):
            value = scaled(value, as_sum_over_workers)
        if next(are_sums, False):
            value = scaled(value, lambda part: as_average(part, context))
        terms[place] = value
    return terms


def scaled(value: Any, scale: Callable[[jax.Array], Any]) -> Any:
    """Maps `scale` over the floats of a gradient or another pytree; the indices of rows stay."""
    return jax.tree.map(
        lambda part: scale(part) if jnp.issubdtype(part.dtype, jnp.inexact) else part, value
    )


def following(terms: StepTerms | None) -> contextlib.AbstractContextManager[StepState]:
    """Scales the sums of a step, in a `with` block that traces it."""
    found = None if terms is None else zip(terms.are_sums, terms.are_of_worker, strict=True)
    return in_step(terms=None if found is None else iter(found))


def terms_of_step(step: Callable[[Any], Any], data: Any, context: ReplicaContext) -> StepTerms:
    """Traces a step without effect and returns what grows with its rows; nothing if it fails."""
    terms = _terms(step, data, context, whole_grows=False)
    terms.are_of_worker = [[False] * len(each) for each in terms.are_sums]
    if shares_batches():
        of_worker = _terms(step, data, context, whole_grows=True)
        if [len(each) for each in of_worker.are_sums] == [len(each) for each in terms.are_sums]:
            terms.are_of_worker = of_worker.are_sums
        terms.has_mixed |= of_worker.has_mixed
    return terms


def _terms(
    step: Callable[[Any], Any], data: Any, context: ReplicaContext, *, whole_grows: bool
) -> StepTerms:
    """Returns what grows with the rows of one replica, or of all replicas of this worker."""
    size = context.batch.size
    assert size is not None
    leaves, structure = jax.tree.flatten(data)
    traces, asked = [], set[str]()
    try:
        for rows in (size, 2 * size):
            call = _Call(step, structure, leaves, context, rows, asked, whole_grows)
            given = [call.with_rows(leaf) for leaf in leaves]
            traces.append((jax.make_jaxpr(call)(given), call.recorded))
    except Exception:  # noqa: BLE001 - user code may accept one number of rows only
        return StepTerms()
    (one, recorded), (other, of_other) = traces
    counts = [len(values) for values in recorded]
    if counts != [len(values) for values in of_other]:
        return StepTerms()
    found = row_degrees([one, other], (size, 2 * size))
    degrees = iter(found.degrees)
    by_call = [[next(degrees) for _ in range(count)] for count in counts]
    return StepTerms(
        are_sums=[[degree == 1.0 for degree in each] for each in by_call],
        places=[] if "mask" in asked else _places(found.combining),
        mixing=[] if "gather" in asked else _places(found.mixing),
        summed_means=_places(found.summed_means, are_calls=True),
        has_mixed=any(MIXED in each for each in by_call),
    )


class _Call:
    """A step with some number of rows, as a function whose results are what it averages."""

    def __init__(
        self,
        step: Callable[[Any], Any],
        structure: Any,
        leaves: list[Any],
        context: ReplicaContext,
        rows: int,
        asked: set[str],
        whole_grows: bool,
    ) -> None:
        self._step = step
        self._structure = structure
        self._size = context.batch.size
        self._rows = rows
        of_others = 3 * (self._size or 0) + 1
        total = 3 * rows if whole_grows else of_others
        batch = _AnalyzedBatch(size=rows, total=total, part=rows / of_others, asked=asked)
        # Of a sole replica, losses would be those of one device and not scaled.
        num_replicas = max(2, context.num_replicas_in_sync)
        communicator = _Elsewhere(num_replicas, asked, whole_grows)
        self._context = ReplicaContext(
            context.strategy, context.replica_id_in_sync_group, communicator, batch
        )
        self.recorded: list[list[Any]] = []

    def with_rows(self, leaf: Any) -> Any:
        """Returns the shape of an array of the batch with this number of rows."""
        shape = np.shape(leaf)
        has_rows = bool(shape) and shape[0] == self._size
        return jax.ShapeDtypeStruct((self._rows, *shape[1:]) if has_rows else shape, leaf.dtype)

    def __call__(self, given: list[Any]) -> list[Any]:
        outer = current_scope()
        assert outer is not None
        self.recorded = []
        in_replica = stack.push(stack.FrameKind.REPLICA, self._context.strategy, self._context)
        # In this mode a worker asks no others for their parts of the batch.
        state = in_step(recorded=self.recorded)
        scope = ReplicaScope(outer.get_current_value)
        with state, step_mode(StepMode.MEAN), in_replica, scope, Collector():
            self._step(jax.tree.unflatten(self._structure, given))
        return [value for values in self.recorded for value in values]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AnalyzedBatch(ReplicaBatch):
    """A batch of which this replica's part grows and the whole does not."""

    total: int
    part: float
    asked: set[str]

    @property
    def fraction(self) -> float | None:
        return self.part

    def global_num_examples(self, num_replicas: int) -> Any:
        return self.total

    def mask(self, replica_id: object) -> Any:
        self.asked.add("mask")  # the step handles padding itself
        return super().mask(replica_id)


class _Elsewhere(SoleCommunicator):
    """Stands for replicas whose numbers are not known."""

    def __init__(self, num_replicas: int, asked: set[str], whole_grows: bool) -> None:
        super().__init__()
        self._num_replicas = num_replicas
        self._asked = asked
        self._whole_grows = whole_grows

    @property
    def num_replicas(self) -> int:
        return self._num_replicas

    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        array = jnp.asarray(super().all_reduce(op, value))
        if op is ReduceOp.SUM:
            with jax.named_scope(SUM_OVER_REPLICAS):
                array = jnp.copy(array)  # an operation that the analysis finds
        if self._whole_grows:
            return array
        return jnp.full(array.shape, 1, array.dtype) + 0 * array  # JAX drops what is unused

    def all_gather(self, value: object, axis: int, lengths: tuple[int, ...] | None) -> Any:
        self._asked.add("gather")
        return jnp.concatenate([jnp.asarray(value)] * self._num_replicas, axis)

    def among(self, groups: tuple[tuple[int, ...], ...], *, packs: bool = False) -> Any:
        return _Elsewhere(len(groups[0]), self._asked, self._whole_grows)

    def merge(self, strategy: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError  # ends the analysis


def _places(equations: list[JaxprEqn], *, are_calls: bool = False) -> list[str]:
    """Returns the lines of the user's code with some operations; or with calls that make these.

    Operations are left out if this library makes them, or if they are in a call from its layers and
    losses, which leave padding out.
    """
    places: dict[str, None] = {}
    for eqn in equations:
        trace = eqn.source_info.traceback
        frames = list(trace.frames) if trace is not None else []
        files = [frame.file_name.replace("\\", "/") for frame in frames]
        are_own = (_is_code(file) and not (are_calls and "/stratagem/" in file) for file in files)
        own = next((i for i, is_own in enumerate(are_own) if is_own), None)
        if own is None or "/stratagem/" in files[own]:
            continue
        if not any(_HANDLES_ROWS in file for file in files[own:] if "step_mode" not in file):
            places[f"{files[own].rpartition('/')[2]}:{frames[own].line_num}"] = None
    return list(places)


def _is_code(file: str) -> bool:
    return not any(part in file for part in _NOT_OF_USER)
