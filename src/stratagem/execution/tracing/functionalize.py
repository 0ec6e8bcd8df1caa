"""`ReplicaScope`: turns variable reads and writes of a replica function into inputs and outputs.

Keras sends every read and update to the innermost `keras.StatelessScope`, its public hook. A
`ReplicaScope` forwards reads to the holder of this replica's state.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import keras
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, get_opaque_trace_state

from stratagem.devices.mesh import Topology
from stratagem.errors import invalid
from stratagem.execution.jaxprs import without_unused
from stratagem.execution.summary.collector import CollectedSummaries
from stratagem.execution.tracing.arguments import Arguments, Results
from stratagem.execution.tracing.remote_state import (
    Ids,
    Lookup,
    RemoteState,
    UpdatedValue,
    WholeInput,
)
from stratagem.resources import changing
from stratagem.variables.distributed import IndexedSlices
from stratagem.variables.registry import home_of, is_on_read

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts

# Initialization of variables that a replica function creates on its first call.


def initialize_created() -> None:
    """Initializes variables that this thread created in Keras scopes."""
    with keras.StatelessScope():  # Keras does so on leaving the outermost scope
        pass


def initialize_created_variables(strategy: StrategyParts) -> None:
    """Initializes variables created by a replica function, outside its trace."""
    initialize_created()
    for variable in strategy.variables.uninitialized():  # created in a replica's thread
        variable.initialize()


def is_uninitialized(variable: Any) -> bool:
    """True if a Keras variable was created in a trace and has no value yet."""
    if hasattr(variable, "has_value"):  # reading the value may fetch it from a server
        return not variable.has_value
    return getattr(variable, "_value", None) is None


def stand_in(variable: Any) -> Any:
    """Returns an initial value for a variable created in this trace; None for others.

    Keras reads variables through the scope for regularization losses, before they have values.
    """
    if not is_uninitialized(variable):
        return None
    return variable._initializer(variable._shape, dtype=variable._dtype)


# JAX caches a `jax.jit` within a step by the shapes of its arguments. Its program also depends on
# the true rows of the batch, and closes over variables it reads, which are tracers of the step.
_key_of_jits = jax.make_user_context()
_keys = itertools.count()


class _OpByOp:
    """Keys of eager steps: one for each replica and its rows, the same in every step.

    With a new key in each step, JAX compiled every operation again: a step of one dense layer took
    1 to 2.6 s of a core, for 0.02 in Keras. `jax.checkpoint` traces its function even in eager
    mode, and caches the trace. Once such a function has read a variable, each step gets a new key.
    """

    keys: ClassVar[dict[object, int]] = {}
    has_traced_reads = False


def _is_op_by_op() -> bool:
    config: Any = jax.config
    return config.jax_disable_jit and not _OpByOp.has_traced_reads


def _is_in_a_jaxpr() -> bool:
    return isinstance(jax.lax.neg(np.float32(0.0)), Tracer)


class _OfThread(threading.local):
    scope: ReplicaScope | None = None
    is_on_global_model = False
    optimizers: dict[int, Any] | None = None  # applied in a step that is captured


_current = _OfThread()


def current_scope() -> ReplicaScope | None:
    """Returns the innermost ReplicaScope of this thread; None outside every replica function."""
    return _current.scope


def on_global_model() -> contextlib.AbstractContextManager[None]:
    """Makes variables with local copies stand for the global model in a `with` block."""
    return changing(_current, is_on_global_model=True)


def _held(variable: Any) -> Any:
    """Returns the variable that holds this replica's value: a local copy, if there is one."""
    if _current.is_on_global_model:
        return variable
    copy = getattr(variable, "local_copy", None)
    return variable if copy is None else copy


class ReplicaScope(keras.StatelessScope):
    """Holds a replica's reads and writes; nothing outside changes until the step ends.

    `read` is called with a variable on its first read, and returns this replica's value, or None to
    use the value stored in the variable. `remote` gives access to variables outside this process.
    Sets and dicts of ints are keyed by `id(variable)`.
    """

    def __init__(self, read: Callable[[Any], Any], remote: RemoteState | None = None) -> None:
        super().__init__(collect_losses=True, initialize_variables=False)
        self._read = read
        self._remote = remote
        self._outer: ReplicaScope | None = None
        self._trace: Any = None
        self.read_ids: set[int] = set()
        self.writes: dict[int, Any] = {}
        self.unproven: dict[int, Any] = {}
        self._rows: dict[int, tuple[Any, IndexedSlices]] = {}
        self.sent: list[tuple[Any, Any]] = []
        # Numbers of sent values from which servers have updated a variable.
        self.updated_after: dict[int, int] = {}
        self.preparations: list[Callable[[], None]] = []
        self.added_to: set[int] = set()  # added to, not set
        self.num_writes: collections.Counter[int] = collections.Counter()
        self.replica: object = None  # in eager mode, what its context tells: hashable
        # In eager mode, the ids of losses that belong to each layer called, by the layer's id.
        self.ids_of_losses: dict[int, set[int]] = {}
        self.early: list[tuple[Any, Any]] = []  # assignments to variables without a value
        self.read_in_jits: set[int] = set()  # read inside a `jax.jit` or the like
        self.row_counts: dict[int, int] = {}  # rows present of a variable that holds only some
        # Returns the index and rows of a lookup in a remote or offloaded table; None without any.
        self.receive: Callable[[Lookup], tuple[int, Any]] | None = None
        self.whole_tables: frozenset[int] = frozenset()  # such tables that are fetched whole

    def __enter__(self) -> ReplicaScope:
        super().__enter__()
        self._key = self._key_of_its_jits()
        self._key.__enter__()
        self._trace = get_opaque_trace_state(convention="nnx")
        self._outer = _current.scope
        _current.scope = self
        return self

    def __exit__(self, *args: object) -> None:
        _current.scope = self._outer
        self._key.__exit__(None, None, None)
        super().__exit__(*args)

    def _key_of_its_jits(self) -> contextlib.AbstractContextManager[Any]:
        if _is_op_by_op():
            if self.replica is not None:
                return _key_of_jits(_OpByOp.keys.setdefault(self.replica, next(_keys)))
            if _current.scope is not None:
                return contextlib.nullcontext()  # the replica's
        return _key_of_jits(next(_keys))

    def get_current_value(self, variable: object) -> Any:
        """Returns this replica's value of a variable; None if it is not held here."""
        self.read_ids.add(id(variable))
        variable = _held(variable)
        self.read_ids.add(id(variable))
        if _current.scope is self and not self.is_at_its_own_level:
            self.read_in_jits.add(id(variable))
            if _is_op_by_op() and _is_in_a_jaxpr():
                _OpByOp.has_traced_reads = True
                _key_of_jits(next(_keys)).__enter__()  # until the replica's scope ends
        value = self.state_mapping.get(id(variable))
        if value is None:
            value = self._unwritten(variable)
        return stand_in(variable) if value is None else value

    def _unwritten(self, variable: Any) -> Any:
        after = self.updated_after.get(id(variable))
        if after is None or self.receive is None:
            return self._read(variable)
        updated = UpdatedValue(variable, tuple(variable.shape), variable.dtype, after)
        return self.receive(updated)[1]

    def unwritten_value(self, variable: keras.Variable) -> Any:
        """Returns the value that a variable has before what the function writes."""
        return self._unwritten(_held(variable))

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Records the new value of a variable."""
        variable, value = _held(update[0]), update[1]
        self.keep(variable, value)
        self.num_writes[id(variable)] += 1
        if is_uninitialized(variable):
            self.early.append((variable, self.written_value(variable)))

    def keep(self, variable: keras.Variable, value: object) -> None:
        """Records a new value without counting it as an assignment."""
        variable = _held(variable)
        if not self.is_at_its_own_level:
            raise invalid(
                f"Variable {variable.path!r} was assigned inside lax.cond, lax.scan, jax.jit "
                "or the like, within a replica function.",
                expected="assignments in the replica function itself; those of an inner "
                "function are lost when it ends.",
                fix="return the value from the inner function and assign it outside; for an "
                "optimizer, use stateless_apply inside.",
                code="SG203",
            )
        if id(variable) in self.read_in_jits and not _is_op_by_op():
            _key_of_jits(next(_keys)).__enter__()  # until this scope ends
        self.state_mapping[id(variable)] = value
        self.writes[id(variable)] = variable
        self.unproven.pop(id(variable), None)
        if home_of(variable) is None:  # without a strategy: one value for all replicas
            self.mark_unproven(variable)

    def held(self, variable: Any) -> Any:
        """Returns the variable that holds this replica's value: a local copy, if there is one."""
        return _held(variable)

    def written_value(self, variable: keras.Variable) -> Any:
        """Returns the last value written to a variable, in the variable's dtype."""
        return jax.lax.convert_element_type(self.state_mapping[id(variable)], variable.dtype)

    def mark_unproven(self, variable: keras.Variable) -> None:
        """Marks a written value that must still be proven equal on all replicas."""
        self.unproven[id(variable)] = variable

    def note_rows(self, gradient: object, slices: IndexedSlices) -> None:
        """Records the rows outside which a gradient is zero."""
        self._rows[id(gradient)] = (gradient, slices)

    @property
    def outermost(self) -> ReplicaScope:
        """The scope of the whole replica function."""
        return self if self._outer is None else self._outer.outermost

    def has_written(self, variable: keras.Variable) -> bool:
        """Returns True if a variable was written in this or an enclosing scope."""
        is_here = id(_held(variable)) in self.writes
        return is_here or (self._outer is not None and self._outer.has_written(variable))

    @property
    def is_at_its_own_level(self) -> bool:
        """True outside `lax.cond` and similar control flow in the replica function."""
        return self._trace == get_opaque_trace_state(convention="nnx")

    def prepare(self, function: Callable[[], None]) -> None:
        """Registers a function to call outside the trace before the step first runs."""
        self.preparations.append(function)

    def send(self, what: object, value: object) -> None:
        """Outputs this replica's `value` to the remote variables; `what` says what it is.

        Raises ValueError inside `lax.cond` and the like.
        """
        if not self.is_at_its_own_level:
            raise invalid(
                "An optimizer of variables on parameter servers was applied inside lax.cond, "
                "lax.scan, jax.jit or the like, within a replica function, or a masked loss "
                "of a batch that workers share was computed there.",
                expected="an update or a loss in the replica function itself.",
                fix="return the gradients from the inner function, and apply them outside.",
                code="SG203",
            )
        self.sent.append((what, value))

    def leave_to_servers(self, variables: Iterable[Any]) -> None:
        """Makes later reads return what servers have made of variables with all that was sent."""
        for variable in variables:
            key = id(variable)
            for own in (self.state_mapping, self.writes, self.unproven):
                own.pop(key, None)
            self.added_to.discard(key)
            self.updated_after[key] = len(self.sent)

    def captured(self) -> tuple[CapturedWrites, list[Any]]:
        """Returns what was written here and its values, which a function may return; see `replay`.

        Call it in the function whose trace this scope belongs to.
        """
        written = [(one, key in self.unproven) for key, one in self.writes.items()]
        captured = CapturedWrites(
            written,
            self.num_writes,
            [variable for variable, _ in self.early],
            [what for what, _ in self.sent],
        )
        values = [self.written_value(variable) for variable, _ in written]
        return captured, [*values, *(value for _, value in [*self.early, *self.sent])]

    def withdraw(self, variable: Any) -> None:
        """Forgets what was written to a variable."""
        for own in (self.state_mapping, self.writes, self.unproven):
            own.pop(id(variable), None)
        self.added_to.discard(id(variable))

    def is_late(self, variable: keras.Variable) -> bool:
        """Returns True if servers update the variable after the step."""
        sent = [what for what, _ in self.sent]
        return self._remote is not None and self._remote.updates_after_step(variable, sent)

    def rows_of(self, gradient: object) -> IndexedSlices | None:
        """Returns the rows of a gradient; None if none were recorded for this very array."""
        _, slices = self._rows.get(id(gradient), (None, None))
        return slices

    def forget(self) -> None:
        """Clears all writes after they were stored, so that reads see the stored values."""
        self.state_mapping.clear()
        self.writes.clear()
        self.unproven.clear()

    def set_value(self, variable: object, value: object) -> None:
        """Sets a variable's value within this scope, without counting it as a write."""
        self.state_mapping[id(_held(variable))] = value


@dataclasses.dataclass(frozen=True)
class CapturedWrites:
    """Variables assigned inside a function that JAX transforms, such as by `jax.checkpoint`.

    The function returns their new values, and `replay` assigns them outside of it.
    """

    written: list[tuple[Any, bool]]  # variable, and if its value is to be proven equal everywhere
    num_writes: collections.Counter[int]  # assignments to each variable, by id
    early: list[Any] = dataclasses.field(default_factory=list)  # variables that had no value
    sent: list[Any] = dataclasses.field(default_factory=list)

    def replay(self, values: Iterable[Any], outer: keras.StatelessScope | None) -> None:
        """Writes values, in the order of `ReplicaScope.captured`, in another scope or in none."""
        remaining = iter(values)
        for variable, is_unproven in self.written:
            value = next(remaining)
            if outer is None:
                variable.assign(value)
            elif not isinstance(outer, ReplicaScope):
                outer.add_update((variable, value))
            else:
                outer.keep(variable, value)
                if is_unproven:
                    outer.mark_unproven(_held(variable))
        if isinstance(outer, ReplicaScope):
            outer.num_writes.update(self.num_writes)
            outer.early += [(variable, next(remaining)) for variable in self.early]
            outer.sent += [(what, next(remaining)) for what in self.sent]


# `Trace`: the result of tracing a replica function.


@dataclasses.dataclass
class Trace:
    """The traced step of one replica.

    Outputs of `jaxpr` are the new values of `written`, then the array results, the values of
    `summaries`, and the values of `sent`.
    """

    jaxpr: ClosedJaxpr
    read_only: list[Any]  # variables
    written: list[Any]  # variables
    # ("read_only", i), ("written", i), ("split", i), ("shared", i), ("constant", i), ("rows", i)
    inputs: list[tuple[str, int]]
    constants: list[Any]  # arrays that the function closed over
    results: Results
    # Row lookups whose rows come from outside, as inputs ("rows", i).
    lookups: list[Lookup] = dataclasses.field(default_factory=list[Lookup])
    # Meaning of each trailing output, which leaves the process.
    sent: list[Any] = dataclasses.field(default_factory=list[Any])
    added_to: frozenset[int] = frozenset()  # ids of variables that were only added to
    summaries: CollectedSummaries | None = None
    records: int | None = None  # index of the constant that turns recording of summaries on
    splits_sequences: bool = False  # True if a replica's devices share sequences
    # Held by a thread that runs it.
    lock: Any = dataclasses.field(default_factory=threading.RLock, repr=False, compare=False)

    @property
    def variables(self) -> list[Any]:
        """Variables that the step reads or writes, with the tables of its lookups."""
        return [*self.written, *self.read_only, *(lookup.table for lookup in self.lookups)]

    def variable(self, source: str, index: int) -> Any:
        """Returns the variable that an input is; None for other inputs."""
        if source == "written":
            return self.written[index]
        return self.read_only[index] if source == "read_only" else None

    @property
    def differing_inputs(self) -> list[bool]:
        """Returns, for each input of the jaxpr, True if it may differ between replicas."""
        flags: list[bool] = []
        owners = [lookup for lookup in self.lookups for _ in lookup.inputs]
        for source, index in self.inputs:
            if (variable := self.variable(source, index)) is not None:
                flags.append(is_on_read(variable))
            else:
                is_of_all = source == "rows" and isinstance(owners[index], WholeInput)
                flags.append(source in ("split", "rows") and not is_of_all)
        return flags

    @functools.cached_property
    def stages(self) -> list[int]:
        """Numbers of sent values that must be used before the step goes on with the results.

        The step reads variables again that servers update from these values.
        """
        jaxpr = self.jaxpr.jaxpr
        if not any(lookup.after for lookup in self.lookups):
            return []
        _, stays = without_unused(jaxpr, [False] * len(jaxpr.invars))
        pairs = zip(self.inputs, stays, strict=True)
        used = {index for (source, index), stay in pairs if source == "rows" and stay}
        owners = [lookup for lookup in self.lookups for _ in lookup.inputs]
        return sorted({owners[index].after for index in used} - {0})

    def after_sending(self, count: int) -> Trace:
        """Returns the trace of a step that has sent its first `count` values, apart from ids."""
        first = len(self.written) + self.num_outputs
        kept = [
            place for place, what in enumerate(self.sent) if place >= count or isinstance(what, Ids)
        ]
        outputs = self.jaxpr.jaxpr.outvars
        rest = outputs[first + len(self.sent) :]
        outvars = [*outputs[:first], *(outputs[first + place] for place in kept), *rest]
        jaxpr = ClosedJaxpr(self.jaxpr.jaxpr.replace(outvars=outvars), self.jaxpr.consts)
        return dataclasses.replace(self, jaxpr=jaxpr, sent=[self.sent[place] for place in kept])

    @property
    def trains(self) -> bool:
        """True if the step sets weights that are trained."""
        return any(getattr(variable, "trainable", False) for variable in self.written)

    def without_summaries(self) -> Trace:
        """Returns the trace of the same step without summaries."""
        first = len(self.written)
        outputs = self.jaxpr.jaxpr.outvars
        remaining = [*outputs[: first + self.num_results], *outputs[first + self.num_outputs :]]
        jaxpr = ClosedJaxpr(self.jaxpr.jaxpr.replace(outvars=remaining), self.jaxpr.consts)
        return dataclasses.replace(self, jaxpr=jaxpr, summaries=None, records=None)

    @property
    def num_results(self) -> int:
        """Number of arrays that the function returns."""
        return self.results.num_outputs

    @property
    def num_outputs(self) -> int:
        """Number of arrays in the function's result and its summaries."""
        summaries = self.summaries
        return self.num_results + (0 if summaries is None else summaries.structure.num_leaves)


# Capture of a program's training step instead of running it, for planning.
#
# While `capture` runs a program, the first replica function that trains aborts it with a
# `StepCaptured`. Replica functions before it, such as an evaluation, return zeros.


@dataclasses.dataclass(frozen=True)
class CapturedStep:
    """A training step that was traced but not run."""

    strategy: Any
    fn: Callable[..., Any]
    arguments: Arguments
    trace: Trace
    optimizers: tuple[Any, ...]  # applied by the step
    retrace: Callable[[Arguments, Topology], Trace]  # for other arguments or devices


class StepCaptured(BaseException):
    """Aborts a program at its first training step, and carries the step."""

    def __init__(self, step: CapturedStep) -> None:
        super().__init__()
        self.step = step


class _Capture:
    """Capture in progress, for all threads, since a program may train in another thread."""

    is_on: bool = False
    takes_all: bool = False


capturing = _Capture()


def capture(run: Callable[[], Any], *, takes_all: bool = False) -> CapturedStep | None:
    """Runs a program until its first training step, which is neither compiled nor run.

    Returns None if there is none. With `takes_all`, captures the first step of any kind.
    """
    with changing(capturing, is_on=True, takes_all=takes_all):
        try:
            run()
        except StepCaptured as captured:
            return captured.step
    return None


def note_optimizer(optimizer: object) -> None:
    """Records that the replica function being traced applies an optimizer."""
    if _current.optimizers is not None:
        _current.optimizers[id(optimizer)] = optimizer


def offer_step(
    strategy: StrategyParts,
    fn: Callable[..., Any],
    arguments: Arguments,
    trace: Callable[[Callable[..., Any], Arguments, Topology], Trace],
) -> None:
    """Raises `StepCaptured` if the capture that is on wants this step."""
    applied: dict[int, Any] = {}
    with changing(_current, optimizers=applied):
        traced = trace(fn, arguments, strategy.topology)
    optimizers = tuple(applied.values())
    trains = any(getattr(variable, "trainable", False) for variable in traced.written)
    if trains or capturing.takes_all:
        raise StepCaptured(
            CapturedStep(
                strategy,
                fn,
                arguments,
                traced,
                optimizers,
                lambda other, topology: trace(fn, other, topology),
            )
        )
