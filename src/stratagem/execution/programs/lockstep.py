"""Lockstep execution: one compiled SPMD program for all replicas, cached by function and shapes.

The carry of `run_steps` is state that a function passes from step to step, as in `jax.lax.scan`.
Each array is stored in a `CarrySlot`, which steps read and write like a variable with one component
per replica. Programs and eager mode therefore need no special case.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import jax
import jax.numpy as jnp

from stratagem import config, settings
from stratagem.contexts import get_strategy
from stratagem.devices.finding import placeholder
from stratagem.devices.lockstep import compiling
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import local_copy
from stratagem.devices.shared_sums import in_order, is_connected
from stratagem.errors import InvalidArgumentError, explain, invalid
from stratagem.execution.eager import run_eagerly
from stratagem.execution.programs.offloaded_step import OffloadedStep, StoredRows, is_offloaded
from stratagem.execution.programs.program import (
    ArgumentKinds,
    FunctionKeys,
    JaxSettings,
    Program,
    Recompilations,
    Wrapper,
    paused_garbage_collection,
)
from stratagem.execution.programs.sharded_step import ShardedStep, is_sharded
from stratagem.execution.programs.steps import ReplicaStep
from stratagem.execution.replica_context import get_replica_context, is_key
from stratagem.execution.summary.collector import is_tracing, trace_key
from stratagem.execution.tracing.arguments import Arguments, batch_arguments, flatten_arguments
from stratagem.execution.tracing.errors import name_of
from stratagem.execution.tracing.functionalize import Trace, capturing, current_scope, offer_step
from stratagem.execution.tracing.remote_state import RemoteState
from stratagem.execution.tracing.tracer import as_values, trace_replica_function
from stratagem.input.batches import HostBatch
from stratagem.input.iterator import DistributedIterator
from stratagem.input.placement import PlacedBatches
from stratagem.options import ReduceOp, VariableAggregation
from stratagem.variables.components import agree_on_initial_values
from stratagem.variables.distributed import (
    Mirrored,
    PerReplica,
    is_array,
    is_distributed,
    is_per_replica,
)
from stratagem.variables.layouts import require_layouts_used
from stratagem.variables.registry import Home, VariableKind

if TYPE_CHECKING:
    import numpy as np

    from stratagem.contexts import StrategyParts


class CarrySlot:
    """One array of a carry, stored like a variable with a component per replica.

    `value` is one replica's array; `path` is its place in the carry, for messages.
    """

    has_value = True
    trainable = False

    def __init__(self, strategy: StrategyParts, value: jax.Array, path: str) -> None:
        self.path = path
        self.given_shape, self.given_dtype = value.shape, value.dtype
        self.key_impl = jax.random.key_impl(value) if is_key(value) else None
        data = self.as_stored(value)
        self.shape, self.dtype = data.shape, data.dtype
        self.stored: Any = None
        is_sole = strategy.num_replicas_in_sync == 1
        kind = VariableKind.PLAIN if is_sole else VariableKind.ON_READ
        strategy.variables.add_slot(self, Home(strategy, kind, VariableAggregation.NONE))

    @property
    def for_step(self) -> Any:
        """The value that a compiled step receives."""
        return self.stored

    @property
    def storage(self) -> Any:
        """The array of all replicas, under the name that variables have for it."""
        return self.stored

    @storage.setter
    def storage(self, value: object) -> None:
        self.stored = value

    def as_stored(self, value: jax.Array) -> Any:
        """Returns a value in its stored form: random keys as their key data."""
        return jnp.asarray(value) if self.key_impl is None else jax.random.key_data(value)

    def given(self, data: Any) -> Any:
        """Returns a stored value in the form that the function receives."""
        return data if self.key_impl is None else jax.random.wrap_key_data(data, impl=self.key_impl)

    def read(self) -> Any:
        """Returns this replica's value. Call in a step."""
        scope = current_scope()
        return self.given(self.stored if scope is None else scope.get_current_value(self))

    def write(self, value: jax.Array) -> None:
        """Sets this replica's value. Call in a step."""
        scope = current_scope()
        if scope is None:  # the default strategy runs functions without a scope
            self.stored = self.as_stored(value)
        else:
            scope.add_update((self, self.as_stored(value)))


class Carry:
    """State passed between steps of one `run_steps` call; its leaves are `PerReplica` or shared."""

    def __init__(self, strategy: StrategyParts, initial: object) -> None:
        self._strategy = strategy
        self._topology = strategy.topology
        pairs, self.structure = jax.tree_util.tree_flatten_with_path(
            as_values(initial), is_leaf=is_distributed
        )
        paths = [_path(path) for path, _ in pairs]
        parts = [_parts(leaf, path) for path, (_, leaf) in zip(paths, pairs, strict=True)]
        key = self.structure, tuple((one[0].shape, one[0].dtype) for one in parts)
        self._free = cast("Lockstep", strategy.executor).free_slots.setdefault(key, [])
        try:
            self.slots = self._free.pop()
        except IndexError:  # the first call, or all are in use by calls that have not ended
            firsts = zip(paths, parts, strict=True)
            self.slots = tuple(CarrySlot(strategy, one[0], path) for path, one in firsts)
        for slot, own in zip(self.slots, parts, strict=True):
            slot.stored = self._stored([slot.as_stored(part) for part in own])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for slot in self.slots:
            slot.stored = None
        self._free.append(self.slots)

    def _stored(self, parts: list[Any]) -> Any:
        """Returns the array of all replicas as a copy, because a step donates it."""
        topology, first = self._topology, parts[0]
        is_sole = topology.num_replicas == 1
        if topology.is_abstract:
            replicas = () if is_sole else (topology.num_replicas,)
            return placeholder((*replicas, *first.shape), first.dtype)
        if is_sole:
            return topology.replicate(jnp.array(first, copy=True))
        parts = parts * topology.num_local_replicas if len(parts) == 1 else parts
        return topology.stack([jnp.array(part, copy=True) for part in parts])

    def take(self) -> Any:
        """Returns the state after the last step."""
        is_sole = self._topology.num_replicas == 1
        values: list[Any] = []
        for slot in self.slots:
            value = local_copy(slot.stored, self._topology) if is_sole else slot.stored
            values.append(slot.given(value) if is_sole else PerReplica(stacked=slot.given(value)))
        return jax.tree.unflatten(self.structure, values)


def _path(path: tuple[Any, ...]) -> str:
    return f"carry{jax.tree_util.keystr(path)}"


def _parts(leaf: object, path: str) -> list[Any]:
    """Returns the components of one leaf; a single one if all replicas get the same."""
    if isinstance(leaf, PerReplica):
        components = [jnp.asarray(part) for part in leaf.components]
        shapes = [part.shape for part in components]
        if len(set(shapes)) > 1:
            raise invalid(
                f"run_steps received {path} with parts of shapes {shapes}.",
                expected="one shape on all replicas, because they run one program.",
                fix="pad the parts, and add their true lengths to the carry.",
            )
        return components
    leaf = leaf.value if isinstance(leaf, Mirrored) else leaf
    if not (is_array(leaf) or isinstance(leaf, int | float | complex)):
        raise TypeError(
            explain(
                f"run_steps received {path}={leaf!r} of type {type(leaf).__name__}.",
                expected="a pytree of arrays and numbers.",
                fix="let the function close over everything else.",
            )
        )
    return [jnp.asarray(leaf)]


@dataclasses.dataclass(frozen=True)
class CarryingStep(Wrapper):
    """A function of a batch and a carry, wrapped as a replica function of the batch."""

    fn: Any  # its `fn` is the user's function
    slots: tuple[CarrySlot, ...]
    structure: Any
    op: ReduceOp | None  # combines results over replicas; None leaves them separate

    @property
    def _name(self) -> str:
        return name_of(self.fn.fn)

    def __call__(self, batch: object) -> Any:
        """Runs one step of a replica."""
        carry = jax.tree.unflatten(self.structure, [slot.read() for slot in self.slots])
        result = self.fn(batch, carry)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                explain(
                    f"{self._name} returned a value of type {type(result).__name__}.",
                    expected="a pair (carry, result), because run_steps was called with a carry.",
                    fix="write `return carry, result`, or `return carry, None`.",
                    code="SG410",
                )
            )
        carry, result = as_values(result)
        for slot, leaf in zip(self.slots, self._leaves(carry), strict=True):
            slot.write(leaf)
        context = get_replica_context()
        assert context is not None
        return result if self.op is None else context.all_reduce(self.op, result)

    def _leaves(self, carry: object) -> list[Any]:
        """Returns the arrays of the next carry; raises if their shapes or dtypes changed."""
        pairs, structure = jax.tree_util.tree_flatten_with_path(carry)
        if structure != self.structure:
            raise invalid(
                f"{self._name} received a carry of structure {self.structure} and "
                f"returned one of structure {structure}.",
                expected="the same structure.",
                fix="return the same keys, lengths and types as in the initial carry.",
                code="SG410",
            )
        leaves = [jnp.asarray(leaf) for _, leaf in pairs]
        for slot, leaf in zip(self.slots, leaves, strict=True):
            if (leaf.shape, leaf.dtype) != (slot.given_shape, slot.given_dtype):
                raise invalid(
                    f"{self._name} received {slot.path} of shape {slot.given_shape} and "
                    f"dtype {slot.given_dtype}, but returned shape {leaf.shape} and dtype "
                    f"{leaf.dtype}.",
                    expected="the same shape and dtype after each step.",
                    fix="give the initial carry that shape and dtype, or cast the returned "
                    "value: keras.ops.cast(value, dtype).",
                    code="SG410",
                )
        return leaves


# `run_steps`: batches are stacked, moved once, and looped over on the devices.


def run_steps(
    strategy: StrategyParts,
    fn: Callable[[Any], Any],
    iterator: DistributedIterator,
    num_steps: int,
    *,
    reduce_op: ReduceOp | None,
    carry: object,
    eagerly: bool,
) -> Any:
    """Runs a replica function on the next batches of an iterator; see `Lockstep.run_steps`.

    With `eagerly`, steps run one by one, op by op. Raises InvalidArgumentError if results of
    different steps cannot be stacked.
    """
    if carry is not None:
        with Carry(strategy, carry) as state:
            step = CarryingStep(_OfBatch(fn), state.slots, state.structure, reduce_op)
            results = _run_all(strategy, step, iterator, num_steps, reduce_op, eagerly=eagerly)
            return state.take(), results
    step = _OfBatch(fn) if reduce_op is None else _ReducedStep(_OfBatch(fn), reduce_op)
    return _run_all(strategy, step, iterator, num_steps, reduce_op, eagerly=eagerly)


def _run_all(
    strategy: StrategyParts,
    function: Callable[[Any], Any],
    iterator: DistributedIterator,
    num_steps: int,
    reduce_op: ReduceOp | None,
    *,
    eagerly: bool,
) -> Any:
    results: list[Any] = []
    if eagerly:
        first = next(iterator)  # StopIteration at the end of the data
        for batch in itertools.chain([first], itertools.islice(iterator, num_steps - 1)):
            result = run_eagerly(strategy, function, (batch,), {})
            results.append(_mapped(_with_step_axis, result))
    else:
        for placed in iterator.take(num_steps):
            results.append(_run_compiled(strategy, function, placed))
    joined = _mapped(_join, *results)
    if reduce_op is None:
        return joined
    return _mapped(_of_any_replica, joined)


@dataclasses.dataclass(frozen=True)
class _OfBatch(Wrapper):
    """Calls a replica function with a batch, or with the parts of a batch that is a tuple."""

    fn: Callable[..., Any]

    def __call__(self, batch: Any, *carry: object) -> Any:
        is_taken_apart = type(batch) is tuple and not _takes(self.fn, *carry, batch)
        if is_taken_apart and _takes(self.fn, *carry, *batch):
            return self.fn(*carry, *batch)
        return self.fn(*carry, batch)


def _takes(fn: Callable[..., Any], *args: object) -> bool:
    """Returns True if a function accepts these arguments, or has no signature."""
    try:
        inspect.signature(fn).bind(*args)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


@dataclasses.dataclass(frozen=True)
class _ReducedStep(Wrapper):
    """A replica function whose results are reduced over replicas."""

    fn: Callable[[Any], Any]
    op: ReduceOp

    def __call__(self, batch: object) -> Any:
        context = get_replica_context()
        assert context is not None
        return context.all_reduce(self.op, as_values(self.fn(batch)))


def _run_compiled(strategy: StrategyParts, fn: Callable[[Any], Any], placed: PlacedBatches) -> Any:
    arguments = batch_arguments(placed)
    executor = cast("Lockstep", strategy.executor)
    if placed.hosts:
        return _mapped(_with_step_axis, executor.run_batches(fn, placed.hosts, arguments))
    program = executor.program(fn, arguments)
    if placed.num_steps == 1:
        result = program.run(arguments)
        return _mapped(_with_step_axis, result)
    result = program.run_many(arguments.split, arguments.shared)
    return _mapped(_true_rows, result)


def _mapped(fn: Callable[..., Any], *results: object) -> Any:
    return jax.tree.map(fn, *map(as_values, results), is_leaf=is_per_replica)


def _with_step_axis(leaf: object) -> Any:
    if isinstance(leaf, PerReplica):
        if leaf.stacked is not None and leaf.lengths is None:
            return PerReplica(stacked=leaf.stacked[:, None])
        parts = tuple(jnp.asarray(part)[None] for part in leaf.components)
        return PerReplica(objects=parts, lengths=leaf.lengths)
    return leaf[None] if isinstance(leaf, jax.Array) else leaf


def _true_rows(leaf: object) -> Any:
    """Removes padding rows, which are on axis 1 because steps are on axis 0."""
    if not isinstance(leaf, PerReplica) or leaf.lengths is None:
        return leaf
    return PerReplica(objects=leaf.parts(1), lengths=leaf.lengths)


def _join(*leaves: Any) -> Any:
    """Concatenates the steps of several runs."""
    if len(leaves) == 1 or not isinstance(leaves[0], PerReplica | jax.Array):
        return leaves[0]
    if not isinstance(leaves[0], PerReplica):
        return _concatenate(leaves, axis=0)
    if len({leaf.lengths for leaf in leaves}) > 1:  # lengths on all processes
        raise _cannot_be_stacked([_shapes(leaf) for leaf in leaves])
    if all(leaf.stacked is not None for leaf in leaves):
        return PerReplica(stacked=_concatenate([leaf.stacked for leaf in leaves], axis=1))
    columns = zip(*(leaf.components for leaf in leaves), strict=True)
    return PerReplica(objects=tuple(_concatenate(column, axis=0) for column in columns))


def _concatenate(parts: Iterable[jax.Array | np.ndarray], *, axis: int) -> Any:
    parts = list(parts)
    shapes = [part.shape[:axis] + part.shape[axis + 1 :] for part in parts]
    if len(set(shapes)) > 1:
        raise _cannot_be_stacked(shapes)
    return jnp.concatenate(parts, axis=axis)


def _shapes(leaf: PerReplica) -> Any:
    rest = leaf.components[0].shape[2:]
    return [(length, *rest) for length in leaf.lengths or (leaf.components[0].shape[1],)]


def _cannot_be_stacked(shapes: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        explain(
            f"A step function returned arrays of different shapes in different steps: {shapes}.",
            expected="results of one shape, because run_steps stacks them.",
            fix="return sums or means instead of rows, drop the short batch, or call "
            "strategy.run for each batch.",
            code="SG410",
        )
    )


def _of_any_replica(leaf: object) -> Any:
    return leaf.components[0] if isinstance(leaf, PerReplica) else leaf


# Records of the programs that a strategy has compiled, with the reason of each.

_MAX_RECORDS = 1_000


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One compiled program of a function.

    Attributes:
        function: qualified name of the function.
        place: file and line of its definition; "" for a callable without code.
        reason: difference from an earlier call that made this program necessary.

    Example:
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> strategy.run(jax.numpy.sum, args=(np.ones(3),)).item()
        3.0
        >>> [(one.function, one.reason) for one in sg.explain_recompiles(strategy)]
        [('sum', 'first call')]

    Source: specific to Stratagem.
    """

    function: str
    place: str
    reason: str

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{self.function}{place}: {self.reason}"


class _Records:
    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.latest: collections.deque[Compilation] = collections.deque(maxlen=_MAX_RECORDS)


_records: weakref.WeakKeyDictionary[Any, _Records] = weakref.WeakKeyDictionary()


def note_compilation(strategy: object, fn: Any, reason: str) -> None:
    """Records a new program of a function."""
    code = getattr(fn, "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if isinstance(code, types.CodeType) else ""
    compilation = Compilation(name_of(fn), place, reason)
    records = _records.setdefault(strategy, _Records())
    records.counts[compilation.function] += 1
    records.latest.append(compilation)


def compilations_of(strategy: object) -> dict[str, int]:
    """Returns the number of programs by function name, in the order of the first ones."""
    records = _records.get(strategy)
    return {} if records is None else dict(records.counts)


def explain_recompiles(strategy: object = None) -> list[Compilation]:
    """Returns the programs that a strategy compiled, with the reason of each. Call anywhere.

    A program is compiled at the first call of a function, and again for arguments of other shapes,
    dtypes or static values, or for a new function with other values in it.

    Args:
        strategy: whose programs; None for the current one.

    Returns:
        The last 1,000 programs, in the order of their compilation. Printed, each is a line.

    Example:
        >>> strategy = sg.OneDeviceStrategy("cpu:0")
        >>> for rows in (4, 3):
        ...     _ = strategy.run(jax.numpy.sum, args=(np.ones((rows, 2), np.float32),))
        >>> sg.explain_recompiles(strategy)[-1].reason
        'args[0]: float32[4,2] -> float32[3,2]'

    Source: JAX, jax_explain_cache_misses.
    """
    records = _records.get(get_strategy() if strategy is None else strategy)
    return [] if records is None else list(records.latest)


class Lockstep:
    """Runs replica functions on all replicas at once, and caches their programs.

    `steps_per_call` is the default number of steps of `run_steps` and `fit`; None for no default.
    """

    schedules = False  # True if this process only schedules steps on workers
    has_values = True  # False if variables only have shapes because nothing ever runs
    worker: tuple[int, int] = (0, 1)  # index and number of workers that run separate programs

    def __init__(self, strategy: StrategyParts, *, steps_per_call: int | None = None) -> None:
        self._strategy = strategy
        self.steps_per_call = steps_per_call
        self._programs: OrderedDict[Any, Program] = OrderedDict()
        self._keys = FunctionKeys()
        self._settings = JaxSettings()
        self._recompilations = Recompilations()
        # Slots of `run_steps` that are free, by structure, shapes and dtypes.
        self.free_slots: dict[Any, list[tuple[CarrySlot, ...]]] = {}

    @functools.cached_property
    def _orders_sums(self) -> bool:
        return is_connected(self._strategy.topology)

    @property
    def programs(self) -> list[Program]:
        """The cached programs, most recently used last."""
        return list(self._programs.values())

    def check_scope(self) -> None:
        """Raises RuntimeError if this process may not enter the strategy's scope."""

    def settle(self) -> None:
        """Waits until all scheduled work has ended, raising its errors; there is none here."""

    def close(self) -> None:
        """Shuts down anything that the executor started, such as workers; nothing here."""

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a replica function once per replica, in the strategy's scope.

        Each replica gets its component of every `PerReplica` argument. Leaves of the result are
        `PerReplica`; with one replica they are plain values.
        """
        if config.runs_eagerly():
            return run_eagerly(self._strategy, fn, args, kwargs)
        arguments = flatten_arguments(
            args, kwargs, num_replicas=self._strategy.num_replicas_in_sync
        )
        return self.program(fn, arguments).run(arguments)

    def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: DistributedIterator,
        num_steps: int,
        *,
        reduce_op: ReduceOp | None,
        carry: object,
    ) -> Any:
        """Calls a replica function on up to `num_steps` batches of an iterator.

        Returns the results with steps on axis 0; given a carry (a pytree passed from step to step),
        the pair (carry, results). `reduce_op` combines the results of replicas in each step; None
        leaves them separate. Raises StopIteration if the data ends before the first step.
        """
        return run_steps(
            self._strategy,
            fn,
            iterator,
            num_steps,
            reduce_op=reduce_op,
            carry=carry,
            eagerly=config.runs_eagerly(),
        )

    def run_batches(
        self, fn: Callable[..., Any], batches: list[HostBatch], arguments: Arguments | None
    ) -> Any:
        """Calls a function on batches of one signature, which `arguments` have on the devices."""
        assert arguments is not None
        program = self.program(fn, arguments)
        if len(batches) == 1:
            return program.run(arguments)
        return program.run_many(arguments.split, arguments.shared)

    def program(self, fn: Callable[..., Any], arguments: Arguments) -> Program:
        """Returns the program for a function and its arguments; traces the function if needed."""
        if capturing.is_on:
            offer_step(self._strategy, fn, arguments, self._trace)
        # The programs of a call within the user's own have no order between steps.
        is_inside = self._orders_sums and is_tracing()
        number = self._settings.number()
        key = (self._keys.key(fn), arguments.structure, arguments.leaves, is_inside, number)
        program = self._known(key)
        if program is None:
            with self._strategy.variables.lock:
                program = self._known(key) or self._traced(key, fn, arguments)
        return program

    def _known(self, key: Any) -> Program | None:
        program = self._programs.get(key)
        if program is not None and program.trace.summaries is not None:
            program = self._programs.get((key, trace_key()))
        if program is not None:
            try:
                self._programs.move_to_end(key)
            except KeyError:  # another thread has just dropped it
                self._programs[key] = program
            program.usage.is_reused = True
        return program

    def _traced(self, key: Any, fn: Callable[..., Any], arguments: Arguments) -> Program:
        topology = self._strategy.topology
        is_shared = topology.spans_processes
        with (
            compiling(name_of(fn)) if is_shared else contextlib.nullcontext(),
            paused_garbage_collection(),
        ):
            trace = trace_replica_function(self._strategy, fn, arguments)
        agree_on_initial_values(self._strategy.variables, topology)
        if trace.written:
            self._strategy.placement.check()
        require_layouts_used(self._strategy.placement.layouts, trace.written)
        program = self._programs[key] = self._program_of(trace, name_of(fn))
        self._note_compilation(fn, arguments, program)
        if trace.summaries is not None:
            self._programs[(key, trace_key())] = program
        while len(self._programs) > settings.read("program_cache_size"):
            self._programs.popitem(last=False)
        return program

    def _note_compilation(
        self, fn: Callable[..., Any], arguments: Arguments, program: Program
    ) -> None:
        """Notes why a function is compiled, and warns if that happens again and again."""
        kinds = ArgumentKinds(arguments.structure, arguments.leaves)
        reason = self._recompilations.note(fn, kinds, program.usage)
        note_compilation(self._strategy, fn, reason)

    def _program_of(self, trace: Trace, name: str) -> Program:
        placement = self._strategy.placement
        return program_of(
            trace,
            self._strategy.topology,
            name,
            placement.remote,
            is_remote=placement.is_remote,
        )

    def evaluate(self, trace: Trace, name: str, split: list[Any], shared: list[Any]) -> list[Any]:
        """Runs a trace that writes no variables and returns its results for all replicas.

        `split` arrays have a replica axis; `shared` arrays go to all replicas. `name` is for
        messages.
        """
        return Program(ReplicaStep(trace, self._strategy.topology), name).run_for(split, shared)

    def lower(
        self,
        fn: Callable[..., Any],
        arguments: Arguments,
        topology: Topology | None = None,
        num_steps: int = 1,
    ) -> Any:
        """Traces a function and lowers it for a topology, without caching the program.

        The topology has one device group per replica and may be abstract; None means the strategy's
        own. Returns the result of `jax.jit(...).lower`.
        """
        devices: Topology = topology or self._strategy.topology
        trace = trace_replica_function(self._strategy, fn, arguments, devices)
        return program_of(trace, devices, name_of(fn)).lower(arguments, num_steps)

    def _trace(self, fn: Callable[..., Any], arguments: Arguments, topology: Topology) -> Trace:
        return trace_replica_function(self._strategy, fn, arguments, topology)


def program_of(
    trace: Trace,
    topology: Topology,
    name: str,
    remote: RemoteState | None = None,
    *,
    is_remote: bool = False,
) -> Program:
    """Returns the program of a trace.

    `remote` gives access to variables outside this process, or is None; `is_remote` is True if all
    variables are there. `name` is for messages.
    """
    if remote is not None and not (is_remote or remote.holds(trace)):
        remote = None

    def made(trace: Trace) -> Program:
        step, access = _step_of(trace, topology, name, remote)
        return Program(step, name, access)

    program = made(trace)
    if trace.summaries is not None:
        program.make_plain = functools.cache(lambda: made(trace.without_summaries()))
    return program


def _step_of(
    trace: Trace, topology: Topology, name: str, remote: RemoteState | None
) -> tuple[ReplicaStep, RemoteState | None]:
    """Returns how a step is computed, and the access to variables outside of its program."""
    if not is_offloaded(trace):
        # Within a program of the user's, two steps could run at once and without an order.
        has_order = remote is None and is_connected(topology) and not is_tracing()
        ordered = in_order(trace.jaxpr) if has_order else None
        step = ReplicaStep(trace, topology, ordered=ordered, is_staged=remote is not None)
        return step, remote
    if remote is None and is_sharded(trace, topology):
        return ShardedStep(trace, topology, name), None
    if remote is None and trace.lookups:
        remote = StoredRows(topology)
    return OffloadedStep(trace, topology, is_staged=remote is not None), remote
