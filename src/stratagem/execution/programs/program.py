"""`Program`: the compiled program of a traced replica function, for one step or many.

A function's identity decides whether its program is used again. A warning explains programs that
are compiled too often.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import itertools
import reprlib
import sys
import threading
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.devices.finding import placeholder
from stratagem.devices.lockstep import record_program, run_together
from stratagem.devices.mesh import Topology, is_explicit, start_lock
from stratagem.devices.private import settings_of_traces
from stratagem.errors import explain
from stratagem.execution.programs.steps import (
    EarlyProgram,
    IdsProgram,
    QueuedInput,
    ReplicaStep,
    StepProgram,
    input_bytes,
    is_large,
    loop_options,
)
from stratagem.execution.summary.collector import is_tracing
from stratagem.execution.summary.kinds import StepSummaries
from stratagem.execution.tracing.arguments import Arguments, Leaf, Static
from stratagem.execution.tracing.errors import (
    agree_on_program,
    assigned_under_jit,
    explicit_in_jit,
    name_of,
)
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.remote_state import RemoteState
from stratagem.logs import warn_on_one_worker
from stratagem.observe.recorder import observed_call

# Differences between the arguments of two calls that need different programs.


class ArgumentKinds(NamedTuple):
    """Structure of `(args, kwargs)`, and what each leaf contributes to the program."""

    structure: Any
    kinds: tuple[Leaf, ...]

    def with_weak_references(self) -> ArgumentKinds:
        """Returns what describes the arguments without keeping static ones, such as models."""
        return self._replace(kinds=tuple(map(_with_weak_reference, self.kinds)))


def _with_weak_reference(kind: Leaf) -> Leaf:
    if kind.static is None:
        return kind
    try:
        value: Any = weakref.ref(kind.static.value)  # the same for each call with the object
    except TypeError:
        value = kind.static.value
        is_plain = isinstance(value, str | bytes | bool | types.NoneType)
        value = value if is_plain else reprlib.repr(value)
    return kind._replace(static=Static(value))


def differences(before: ArgumentKinds, after: ArgumentKinds) -> list[str]:
    """Returns one line per differing argument, as "args[0]: float32[4] -> float32[3]"."""
    if before.structure != after.structure:
        return [f"arguments: {_tree_text(before)} -> {_tree_text(after)}"]
    pairs = zip(before.kinds, after.kinds, _names(after.structure), strict=True)
    return [f"{name}: {_change(old, new)}" for old, new, name in pairs if old != new]


def _names(structure: Any) -> list[str]:
    """Returns the name of each leaf as an expression, such as "args[0]['x']"."""
    numbered = jax.tree.unflatten(structure, range(structure.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(numbered)[0]]
    return [
        ("args", "kwargs")[path[0].idx] + jax.tree_util.keystr(path[1:])  # pyright: ignore[reportAttributeAccessIssue]
        for path in paths
    ]


def _tree_text(arguments: ArgumentKinds) -> str:
    texts = map(_text, arguments.kinds)
    return reprlib.repr([*map(": ".join, zip(_names(arguments.structure), texts, strict=True))])


def _change(before: Leaf, after: Leaf) -> str:
    old, new = _text(before), _text(after)
    if old != new:
        return f"{old} -> {new}"
    if before.static is not None:
        return f"another object, {new}"
    pairs = zip(_traits(before), _traits(after), strict=True)
    return f"{old}: " + ", ".join(f"{one} -> {other}" for one, other in pairs if one != other)


def _traits(kind: Leaf) -> list[str]:
    """Returns what `_text` leaves out of an array."""
    return [
        "Python number" if kind.is_weak else "array",
        "per replica" if kind.split else "shared",
        "all rows" if kind.lengths is None else f"rows {kind.lengths}",
    ]


def _text(kind: Leaf) -> str:
    if kind.static is not None:
        value = kind.static.value
        return reprlib.repr(value() if isinstance(value, weakref.ref) else value)
    sizes = ",".join(map(str, kind.shape or ()))
    return f"{kind.dtype}[{sizes}]"


_NUM_BEFORE_WARNING = 3
_NUM_KINDS_BEFORE_WARNING = 6
_MAX_PLACES = 1_000
_MAX_KINDS = 100  # of one place


@dataclasses.dataclass
class Usage:
    """Use of one program; outlives the program, which is freed with its function."""

    is_reused: bool = False  # True after its first call


class Recompilations:
    """Programs per function and kinds of arguments, with the reason for each."""

    def __init__(self) -> None:
        self._counts: collections.OrderedDict[Any, int] = collections.OrderedDict()
        self._states: dict[Any, dict[str, Any]] = {}
        self._usages: dict[Any, Usage] = {}
        self._kinds: collections.OrderedDict[Any, dict[ArgumentKinds, Usage]]
        self._kinds = collections.OrderedDict()
        self._warned: set[Any] = set()

    def note(self, fn: object, arguments: ArgumentKinds, usage: Usage) -> str:
        """Records a new program and returns the reason for it.

        Warns if the program is the third in a row for the same arguments, or the sixth for others,
        that was used only once.
        """
        inner = fn.func if isinstance(fn, functools.partial) else fn
        inner = getattr(inner, "__func__", inner)
        changed: list[str] = []
        if isinstance(inner, types.FunctionType):
            changed = self._note_state(inner, hash(arguments), usage)
        code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
        place = code or type(inner)
        known = self._kinds.setdefault(place, {})
        arguments = arguments.with_weak_references()
        if arguments in known:
            return f"a new function: {_state_text(changed)}"
        reason = _nearest(known, arguments)
        known[arguments] = usage
        latest = [*known.values()][-_NUM_KINDS_BEFORE_WARNING:]
        is_wasted = len(latest) == _NUM_KINDS_BEFORE_WARNING and not any(
            one.is_reused for one in latest
        )
        if is_wasted and place not in self._warned:
            self._warned.add(place)
            message = _kinds_message(_place(inner, code), reason)
            warn_on_one_worker(message, RuntimeWarning, stacklevel=2)
        while len(known) > _MAX_KINDS:
            del known[next(iter(known))]
        while len(self._kinds) > _MAX_PLACES:
            oldest, _ = self._kinds.popitem(last=False)
            self._warned.discard(oldest)
        return reason

    def _note_state(self, fn: types.FunctionType, kinds_hash: int, usage: Usage) -> list[str]:
        """Returns the names of values in the function that differ from those of the last one."""
        place = fn.__code__, kinds_hash
        last = self._usages.get(place)
        count = 1 if last is None or last.is_reused else self._counts[place] + 1
        self._counts[place] = count
        self._usages[place] = usage
        state = {name: part and hash(part) for name, part in state_by_name(fn).items()}
        before = self._states.get(place, {})
        self._states[place] = state
        while len(self._counts) > _MAX_PLACES:
            oldest, _ = self._counts.popitem(last=False)
            del self._states[oldest], self._usages[oldest]
        changed = [name for name in state if state[name] is None or state[name] != before.get(name)]
        if count == _NUM_BEFORE_WARNING:
            warn_on_one_worker(_message(fn, count, changed), RuntimeWarning, stacklevel=3)
        return changed


def _nearest(known: Iterable[ArgumentKinds], arguments: ArgumentKinds) -> str:
    """Returns the differences from the known arguments that differ least."""
    candidates = [differences(one, arguments) for one in reversed([*known])]  # the latest first
    return "; ".join(min(candidates, key=len)) if candidates else "first call"


def _state_text(changed: list[str]) -> str:
    return f"the values of {changed} in it differ" if changed else "its state differs"


def _message(fn: types.FunctionType, count: int, changed: list[str]) -> str:
    return explain(
        f"{_place(fn, fn.__code__)} was compiled "
        f"{count} times for arguments of the same kinds: each call passed a new function, and "
        f"{_state_text(changed)}.",
        expected="one function that is compiled once.",
        fix="define it once, outside the loop, and pass the changing values as arguments.",
        code="SG401",
    )


def _kinds_message(place: str, reason: str) -> str:
    return explain(
        f"{place} was compiled for {_NUM_KINDS_BEFORE_WARNING} kinds of arguments in a row, "
        f"each used once. The last time: {reason}.",
        expected="few shapes, dtypes and static values, because each kind is compiled.",
        fix="pad arrays to a few sizes, and pass numbers instead of flags and strings; "
        "sg.explain_recompiles() lists all.",
        code="SG414",
    )


def _place(fn: Any, code: types.CodeType | None) -> str:
    return name_of(fn) + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


# Function keys: a step that is defined anew for each call shares a program while it is the same.
#
# It is the same if its code, its defaults and all that it refers to are: the values of its closure,
# the globals that it names, and what the user's own functions and objects there refer to in turn.
# Objects of libraries count by identity, and layers also by the variables that they train: another
# attribute of one is seen when a step is traced, as in `fit`. A function with a value that cannot
# be compared is only the same as itself, as for `jax.jit`.


# Comparing a larger state takes longer than it saves.
_MAX_OBJECTS = 10_000
_MAX_ARRAY_BYTES = 1 << 20
_PLAIN = (str, bytes, int, enum.Enum, types.NoneType)
_BY_TEXT = (float, complex, np.generic, np.dtype)  # -0.0 is not 0.0
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_BY_VALUE = (types.FunctionType, types.MethodType, functools.partial, tuple, frozenset)
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_FLAGS = ("trainable", "synchronization", "aggregation")


class _UnknownError(Exception):
    """The state cannot be compared."""


class _Key:
    """Stands for a state, whose hundreds of parts would be hashed at each lookup of a program."""


_MAX_SETTINGS = 1_000


class JaxSettings:
    """Numbers of JAX's settings that change what is traced, whose dozens of values hash slowly."""

    def __init__(self) -> None:
        self._latest: tuple[tuple[Any, ...], int] = ((), 0)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._next = itertools.count(1)

    def number(self) -> int:
        """Returns the number of the present settings."""
        latest, number = self._latest
        present = settings_of_traces()
        if present == latest:
            return number
        if len(self._numbers) >= _MAX_SETTINGS:
            self._numbers.clear()
        found = self._numbers.get(present)
        number = self._numbers.setdefault(present, next(self._next)) if found is None else found
        self._latest = present, number
        return number


class Wrapper:
    """Base of the dataclasses that wrap a user's step: equal ones share a program."""


class FunctionKeys:
    """Keys of functions, which last as long as the programs that have them."""

    def __init__(self) -> None:
        # Weak, because a state may refer to its function, as `self.step = lambda x: self.net(x)`.
        self._keys: weakref.WeakKeyDictionary[Any, weakref.ref[_Key]] = weakref.WeakKeyDictionary()
        self._of_states: weakref.WeakValueDictionary[Any, _Key] = weakref.WeakValueDictionary()

    def key(self, fn: Callable[..., Any]) -> Any:
        """Returns a hashable key; functions with equal keys trace to the same program."""
        if isinstance(fn, Wrapper):
            wrapper: Any = fn
            fields = [getattr(wrapper, field.name) for field in dataclasses.fields(wrapper)]
            return type(fn), tuple(self.key(one) if callable(one) else one for one in fields)
        try:
            if (known := self._keys[fn]()) is not None:
                return known
        except (KeyError, TypeError):
            pass
        if (state := function_state(fn)) is None:
            # Each access to a method makes another object, equal to the one before.
            return fn if isinstance(fn, _METHODS) else Static(fn)
        key = self._of_states.setdefault(state, _Key())
        with contextlib.suppress(TypeError):  # not weakly referenceable
            self._keys[fn] = weakref.ref(key)
        return key


def function_state(fn: object) -> Any:
    """Returns all that a function's program depends on; None if it cannot be compared."""
    if not isinstance(fn, types.FunctionType | functools.partial):
        return None
    config = keras.config
    settings = config.floatx(), config.epsilon(), config.image_data_format()
    state = _state_or_none(fn)
    return None if state is None else (state, *settings, config.dtype_policy().name)


def state_by_name(fn: types.FunctionType) -> dict[str, Any]:
    """Returns the state of each name that a function refers to; None if not comparable."""
    return {name: _state_or_none(value) for name, value in _referred(fn).items()}


def _state_or_none(value: object) -> Any:
    try:
        return _state(value, {})
    except (_UnknownError, RecursionError):
        return None


def _state(value: object, places: dict[int, int]) -> Any:
    """Returns the state of a value; `places` numbers the objects before it by their ids."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, _BY_TEXT):
        return type(value), repr(value)
    if id(value) in places:
        return "again", places[id(value)]
    if len(places) >= _MAX_OBJECTS:
        raise _UnknownError
    places[id(value)] = len(places)
    parts = _parts(value)
    # A step may change or return a mutable object, so an equal one is not enough.
    own = None if isinstance(value, _BY_VALUE) and parts is not None else Static(value)
    return type(value), own, tuple(_state(part, places) for part in parts or ())


def _parts(value: Any) -> Iterable[Any] | None:
    """Returns what a value refers to; None if it counts by its identity alone."""
    if isinstance(value, types.FunctionType):
        if _is_of_library(value):
            return None
        defaults = [*(value.__defaults__ or ()), None, *_flat(value.__kwdefaults__ or {})]
        return [value.__code__, *defaults, *_flat(_referred(value))]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, None, *_flat(value.keywords)]
    if isinstance(value, list | tuple | set | frozenset):
        return value
    if isinstance(value, dict):
        return _flat(value)
    if type(value) is np.ndarray and value.nbytes <= _MAX_ARRAY_BYTES and not value.dtype.hasobject:
        return [str(value.dtype), str(value.shape), value.tobytes()]
    if isinstance(value, keras.Variable):  # its value is an input of the program
        return [str(getattr(value, name, None)) for name in _FLAGS]
    if isinstance(value, keras.Layer):
        return value.trainable_variables
    if isinstance(value, jax.Array | types.ModuleType | types.CodeType):
        return None
    kind = value if isinstance(value, type) else type(value)
    is_of_library = _is_of_library(kind) and not isinstance(value, _NAMESPACES)
    # An iterator, or a library's array or table: its content is out of sight.
    if hasattr(kind, "__next__") or (is_of_library and hasattr(kind, "__setitem__")):
        raise _UnknownError
    if is_of_library:
        return None
    if isinstance(value, type):
        return [one for one in vars(value).values() if not isinstance(one, types.FunctionType)]
    state = object.__getstate__(value)
    attributes: Any = state if isinstance(state, tuple) else (state,)  # and those in slots
    return [kind, *(part for some in attributes for part in _flat(some or {}))]


def _flat(mapping: Mapping[Any, Any]) -> list[Any]:
    return [part for item in mapping.items() for part in item]


def _referred(fn: types.FunctionType) -> dict[str, Any]:
    """Returns what a function refers to by name: globals, names of the user's modules, closure."""
    names = _global_names(fn.__code__)
    found = {name: fn.__globals__[name] for name in names if name in fn.__globals__}
    for name, value in [*found.items()]:
        if isinstance(value, types.ModuleType) and not _is_of_library(value):
            found |= {f"{name}.{one}": vars(value)[one] for one in names & vars(value).keys()}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            found[name] = cell.cell_contents
    return dict(sorted(found.items()))


def _global_names(code: types.CodeType) -> set[str]:
    """Returns the names that code and its inner functions look up."""
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return {*code.co_names}.union(*map(_global_names, inner))


def _is_of_library(value: Any) -> bool:
    """Returns True if a module, class or function is from an installed library or from Python."""
    is_module = isinstance(value, types.ModuleType)
    return _is_library((value.__name__ if is_module else value.__module__ or "").partition(".")[0])


@functools.cache
def _is_library(root: str) -> bool:
    if root in sys.stdlib_module_names or root in ("", __name__.partition(".")[0]):
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return root != "__main__" and ("site-packages" in file or "dist-packages" in file)


def placeholder_results(trace: Trace, topology: Topology) -> list[Any]:
    """Returns placeholder outputs for abstract devices; no variable changes."""
    several = topology.num_replicas > 1
    return [
        placeholder((topology.num_replicas, *aval.shape[1:]) if several else aval.shape, aval.dtype)
        for aval in trace.jaxpr.out_avals[len(trace.written) :]
    ]


class NoSummaries:
    """Takes the place of `StepSummaries` for a step without summaries."""

    def decide(self) -> bool:
        """Returns False: no program has fewer summaries."""
        return False

    def begin(self, constants: list[Any]) -> list[Any]:
        """Returns the program's constants."""
        return constants

    def end(self, results: list[Any], num_steps: int | None) -> list[Any]:
        """Returns the results."""
        del num_steps
        return results


class Program:
    """A step, compiled on first use for a single call and for loops over many steps.

    `remote` gives access to variables outside this process, or is None. `make_plain` returns a
    program of the same step without summaries.
    """

    def __init__(self, step: ReplicaStep, name: str, remote: RemoteState | None = None) -> None:
        self.step = step
        self.trace = step.trace
        self.usage = Usage()
        self._name = name
        self._topology = topology = step.topology
        self._devices = set(topology.all_devices or ())
        self._start_lock = start_lock if len(self._devices) > 1 else step.trace.lock
        self._remote = remote
        self._ids: IdsProgram | None = None
        self._early: dict[tuple[int, int], EarlyProgram] = {}
        self._constants: list[Any] | None = None
        has_summaries = step.trace.summaries is not None
        self._summaries = StepSummaries(step.trace, topology) if has_summaries else NoSummaries()
        self.make_plain: Callable[[], Program] | None = None
        self._is_agreed = False
        self._single = step.compiled(many=False)
        self._many: dict[bool, Any] = {}  # by: with compiler options
        self._called: set[Callable[..., Any]] = set()
        self._queued_input = QueuedInput()

    def run(self, arguments: Arguments) -> Any:
        """Runs one step, stores its writes, and returns the result, plain with one replica."""
        if self._summaries.decide() and self.make_plain is not None:
            return self.make_plain().run(arguments)
        return self.run_for(arguments.split, arguments.shared)

    def run_for(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs one step on flat arguments."""
        with observed_call(1, self.written_values, self.trains):
            return self._assembled(self._run(split, shared))

    def run_many(self, split: list[Any], shared: list[Any]) -> Any:
        """Runs all steps in the split arrays in one call on the devices.

        `split` arrays have steps on axis 0 and replicas on axis 1; with one replica, steps only.
        Results have steps on the leading axis of each component.
        """
        if self._topology.is_abstract:
            return self._assembled(placeholder_results(self.trace, self._topology))
        if self._summaries.decide() and self.make_plain is not None:
            return self.make_plain().run_many(split, shared)
        num_steps = len(split[0]) if split else 1
        with observed_call(num_steps, self.written_values, self.trains):
            if self._remote is not None or not self.step.may_loop:
                return self._assembled(self._run_one_by_one(split, shared))
            has_options = loop_options(self._topology) is not None
            if has_options not in self._many:
                self._many[has_options] = self.step.compiled(many=True)
            return self._assembled(self._call(self._many[has_options], split, shared))

    def written_values(self) -> list[Any]:
        """Returns the values of the variables that the step sets; ready when it is done."""
        return [*map(self.step.value, self.trace.written)]

    def trains(self) -> bool:
        """Returns True if a call is a training step."""
        return self.trace.trains

    def _run(self, split: list[Any], shared: list[Any]) -> list[Any]:
        if self._topology.is_abstract:
            return placeholder_results(self.trace, self._topology)
        if self._remote is None:
            return self._call(self._single, split, shared)
        return self._run_with(self._remote, split, shared)

    def _run_with(self, remote: RemoteState, split: list[Any], shared: list[Any]) -> list[Any]:
        """Runs one step that uses variables outside this process."""
        results: list[Any] = []

        def ids_of() -> list[Any]:
            if self._ids is None:
                self._ids = IdsProgram(self.trace, self._topology, self._name)
            with self.trace.lock, self._start_lock:
                return self._ids.run(self._pools(split, shared, []))

        def call(rows: list[Any]) -> list[Any]:
            outputs = self._call(self._single, split, shared, rows)
            results[:] = outputs[: self.trace.num_results]
            return outputs[self.trace.num_results :]

        def send_early(first: int, last: int, rows: list[Any]) -> list[Any]:
            program = self._early.get((first, last))
            if program is None:
                program = EarlyProgram(self.step.whole, self._topology, range(first, last))
                self._early[first, last] = program
            with self.trace.lock, self._start_lock:
                return program.run(self._pools(split, shared, rows))

        remote.run(self.step.whole, ids_of, call, send_early)
        for place, variable in self.trace.results.late:
            results[place] = self._for_each(variable.value)
        return results

    def _for_each(self, value: Any) -> jax.Array:
        """Returns a replicated result in the form of a per-replica result."""
        topology = self._topology
        if topology.num_replicas == 1:
            return value
        return topology.stack([value] * topology.num_local_replicas)

    def _run_one_by_one(self, split: list[Any], shared: list[Any]) -> list[Any]:
        """Runs steps in separate calls, because each fetches values from outside the program."""
        steps = [
            self._run([array[step] for array in split], shared) for step in range(len(split[0]))
        ]
        axis = 1 if self._topology.num_replicas > 1 else 0
        return [jnp.stack(results, axis) for results in zip(*steps, strict=True)]

    def _pools(self, split: list[Any], shared: list[Any], rows: list[Any]) -> dict[str, list[Any]]:
        return {
            "read_only": [partial(self.step.value, one) for one in self.trace.read_only],
            "written": [partial(self.step.value, one) for one in self.trace.written],
            "split": split,
            "shared": shared,
            "constant": self.trace.constants,
            "rows": rows,
        }

    def lower(self, arguments: Arguments, num_steps: int = 1) -> Any:
        """Lowers the program from shapes alone; the devices of the topology may be abstract."""
        function, shapes = self.step.with_shapes(arguments, num_steps)
        return function.lower(*shapes)

    def programs(self, arguments: Arguments) -> list[StepProgram]:
        """Returns all programs of one step in execution order, built from shapes alone."""
        return self.step.programs(arguments, self._name)

    def _call(
        self,
        function: Callable[..., Any],
        split: list[Any],
        shared: list[Any],
        rows: Sequence[Any] = (),
    ) -> list[Any]:
        shared = [*map(self._everywhere, shared)]
        with self.trace.lock:
            written, read_only, constants = self._lasting_inputs()
            values, results, handed = self._start(
                function, (written, read_only, split, shared, constants, [*rows])
            )
            if values and isinstance(values[0], Tracer):
                raise assigned_under_jit(self.trace.written[0])
            self.step.written.replace(values)
            self.step.finish(handed, shared)
        return self._summaries.end(results, None if function is self._single else len(split[0]))

    def _start(self, function: Callable[..., Any], inputs: tuple[list[Any], ...]) -> Any:
        """Returns written values, results, and the arrays for updates of a call."""
        if self._topology.spans_processes:
            if not self._is_agreed:
                agree_on_program(self._name, self.trace.jaxpr)
                self._is_agreed = True

            def start() -> tuple[Any, Any]:
                values, results, token, handed = self._outputs(function, inputs)
                return (values, results, handed), token

            return run_together(self._name, start, platform=self._topology.platform)
        values, results, token, handed = self._outputs(function, inputs)
        if not isinstance(token, tuple):  # a call whose end nobody awaits has none
            record_program(token)
        if not isinstance(token, tuple | Tracer):
            _, _, split, shared, _, _ = inputs
            size_bytes = input_bytes([*split, *shared]) // self._topology.num_replicas
            if is_large(size_bytes):
                self._queued_input.add(token, size_bytes)
        return values, results, handed

    def _outputs(self, function: Any, inputs: tuple[list[Any], ...]) -> Any:
        if function in self._called:
            if self._start_lock is self.trace.lock:
                return function(*inputs)
            with self._start_lock:
                return function(*inputs)
        with paused_garbage_collection():
            if not is_tracing():  # so that other strategies' programs can start meanwhile
                function.lower(*inputs).compile()
            with self._start_lock:
                outputs = function(*inputs)
        self._called.add(function)
        return outputs

    def _lasting_inputs(self) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns the values of written and read variables, and the constants."""
        step = self.step
        if self._constants is None:
            with jax.ensure_compile_time_eval():  # the constants outlive a jax.jit around this call
                self._constants = [*map(self._topology.replicate, self.trace.constants)]
        return (
            step.written.read(step.value),
            step.read_only.read(step.value),
            self._summaries.begin(self._constants),
        )

    def _everywhere(self, value: object) -> Any:
        """Moves an array committed to other devices; the compiled call moves all others."""
        if not isinstance(value, jax.Array):
            return value
        if isinstance(value, Tracer):
            if self._topology.num_replicas > 1 and is_explicit(value):
                raise explicit_in_jit(self._name)
            return value
        if self._topology.spans_processes:
            return self._topology.replicate(value)
        if not value.committed:
            return value
        if is_explicit(value):
            return self._topology.replicate(value)
        is_there = not self._devices or value.sharding.device_set == self._devices
        return value if is_there else self._topology.replicate(value)

    def _assembled(self, outputs: list[Any]) -> Any:
        return self.trace.results.assembled(outputs, self._topology)


# Pause of Python's cyclic garbage collection while a step is traced and compiled.
#
# A trace allocates objects that all stay until it ends. The collector would walk through them again
# and again: a tenth of the time of a large model's first step.


_lock = threading.Lock()
_num_pauses = 0


@contextlib.contextmanager
def paused_garbage_collection() -> Generator[None]:
    """Pauses garbage collection within the block, unless the program has turned it off itself."""
    global _num_pauses
    with _lock:
        is_first = _num_pauses == 0
        is_ours = gc.isenabled() or not is_first
        if is_ours:
            gc.disable()
            _num_pauses += 1
    try:
        yield
    finally:
        if is_ours:
            with _lock:
                _num_pauses -= 1
                if _num_pauses == 0:
                    gc.enable()
