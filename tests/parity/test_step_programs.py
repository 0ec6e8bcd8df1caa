"""Random steps that read, assign and return variables in any container, against NumPy."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import stratagem as sg

_NUM_STEPS = 3
# The aggregation of each variable, and its first value; "own" has a component on each replica.
_VARIABLES = {"mean": 1.0, "sum": 2.0, "only_first_replica": 3.0, "none": 4.0, "own": 0.0}
_Pair = collections.namedtuple("_Pair", ["first", "second"])


@dataclasses.dataclass
class _Record:
    """A dataclass that JAX does not know."""

    one: Any
    other: Any


@dataclasses.dataclass(frozen=True)
class _Op:
    """One line of a step.

    `method` is of the variable; "read" keeps its value in the next register. What is assigned is
    `number`, and with `register` the value of that one is added, with `is_own` the replica's id.
    """

    method: str
    name: str
    number: int
    register: int | None
    is_own: bool


def _ops() -> st.SearchStrategy[_Op]:
    return st.builds(
        _Op,
        method=st.sampled_from(["read", "assign", "assign_add", "assign_sub"]),
        name=st.sampled_from(sorted(_VARIABLES)),
        number=st.integers(-3, 3),
        register=st.none() | st.integers(0, 3),
        is_own=st.booleans(),
    )


def _structures() -> st.SearchStrategy[Any]:
    """Pairs of a kind and parts; leaves are names of variables, numbers of registers, and None."""
    leaves = st.sampled_from([*sorted(_VARIABLES), 0, 1, 2, None])
    kinds = st.sampled_from(["tuple", "list", "dict", "pair", "record"])

    def nested(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.tuples(kinds, st.lists(parts, min_size=2, max_size=2))

    return st.recursive(leaves, nested, max_leaves=6)


def _built(structure: Any, leaf_of: Any) -> Any:
    if not isinstance(structure, tuple):
        return leaf_of(structure)
    kind, parts = structure
    values = [_built(part, leaf_of) for part in parts]
    if kind == "dict":
        return dict(zip("ab", values, strict=True))
    if kind in ("pair", "record"):
        return (_Pair if kind == "pair" else _Record)(*values)
    return values if kind == "list" else tuple(values)


def _leaves(structure: Any, value: Any) -> list[tuple[Any, Any]]:
    """The leaves of a result with what the structure has at their places."""
    if not isinstance(structure, tuple):
        return [(structure, value)]
    kind, parts = structure
    types = {"dict": dict, "list": list, "tuple": tuple, "pair": _Pair, "record": _Record}
    assert type(value) is types[kind]
    if kind == "record":
        value = [value.one, value.other]
    values = list(value.values()) if kind == "dict" else list(value)
    pairs = zip(parts, values, strict=True)
    return [leaf for part, own in pairs for leaf in _leaves(part, own)]


class _Oracle:
    """The same program in NumPy: an array of the replicas' values for each variable."""

    def __init__(self, ops: list[_Op], num_replicas: int) -> None:
        self._ops = ops
        self._ids = np.arange(num_replicas)
        self.values = {name: np.full(num_replicas, one) for name, one in _VARIABLES.items()}

    def step(self) -> list[np.ndarray]:
        """Runs one step, and returns the registers."""
        registers: list[np.ndarray] = []
        for op in self._ops:
            old = self.values[op.name]
            if op.method == "read":
                registers.append(old)
                continue
            value = op.number + 0.0 * self._ids
            if op.name != "none":  # which takes what is the same on all replicas
                value = value + (self._ids if op.is_own else 0)
                if op.register is not None and op.register < len(registers):
                    value = value + registers[op.register]
            value = self._aggregated(op.name, value)
            sign = {"assign": 0, "assign_add": 1, "assign_sub": -1}[op.method]
            self.values[op.name] = old + sign * value if sign else value
        return registers

    def _aggregated(self, name: str, value: np.ndarray) -> np.ndarray:
        one = {"mean": value.mean(), "sum": value.sum(), "only_first_replica": value[0]}.get(name)
        return value if one is None else np.full_like(value, one)


class _Program:
    """The program on the replicas of a strategy."""

    def __init__(self, strategy: sg.Strategy, ops: list[_Op], structure: Any) -> None:
        self._strategy = strategy
        self._ops = ops
        self._structure = structure
        with strategy.scope():
            self.variables = {
                name: sg.Variable(
                    first,
                    aggregation="sum" if name == "own" else name,
                    synchronization="on_read" if name == "own" else "auto",
                )
                for name, first in _VARIABLES.items()
            }

    def step(self, *_: Any) -> Any:
        context = sg.get_replica_context()
        own_id = jnp.asarray(context.replica_id_in_sync_group, "float32")
        registers: list[Any] = []
        for op in self._ops:
            variable = self.variables[op.name]
            if op.method == "read":
                registers.append(variable + jnp.zeros(()))
                continue
            value = jnp.full((), op.number, "float32")
            if op.name != "none":
                value = value + own_id if op.is_own else value
                if op.register is not None and op.register < len(registers):
                    value = value + registers[op.register]
            getattr(variable, op.method)(value)

        def leaf_of(leaf: Any) -> Any:
            if isinstance(leaf, str):
                return self.variables[leaf]
            return None if leaf is None or leaf >= len(registers) else registers[leaf]

        return _built(self._structure, leaf_of)

    def results(self, way: str) -> list[list[tuple[Any, list[Any]]]]:
        """Of each step the leaves of its result, with their parts on the replicas."""
        strategy = self._strategy
        if way == "run_steps":
            iterator = iter(strategy.distribute_dataset([np.zeros(2, "float32")] * _NUM_STEPS))
            leaves = _leaves(self._structure, strategy.run_steps(self.step, iterator, _NUM_STEPS))
            parts = [(place, self._parts(value)) for place, value in leaves]
            return [
                [(place, [None if v is None else v[step] for v in own]) for place, own in parts]
                for step in range(_NUM_STEPS)
            ]
        call = sg.function(lambda: strategy.run(self.step)) if way == "function" else None
        results: list[list[tuple[Any, list[Any]]]] = []
        for _ in range(_NUM_STEPS):
            result = strategy.run(self.step) if call is None else call()
            leaves = _leaves(self._structure, result)
            results += [[(place, self._parts(value)) for place, value in leaves]]
        return results

    def _parts(self, value: Any) -> list[Any]:
        return [value] if value is None else list(self._strategy.local_results(value))


def _check(ops: list[_Op], structure: Any, num_replicas: int, way: str) -> None:
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    program, oracle = _Program(strategy, ops, structure), _Oracle(ops, num_replicas)
    for leaves in program.results(way):
        registers = oracle.step()
        for place, parts in leaves:
            is_register = isinstance(place, int) and place < len(registers)
            if not is_register and not isinstance(place, str):
                assert parts == [None]
                continue
            expected = registers[place] if is_register else oracle.values[place]
            assert len(parts) == num_replicas
            np.testing.assert_allclose(np.stack(parts), expected, rtol=1e-5, err_msg=str(place))
    for name, variable in program.variables.items():
        values = oracle.values[name]
        expected = values.sum() if name == "own" else values[0]
        np.testing.assert_allclose(variable.value, expected, rtol=1e-5, err_msg=name)


_PROGRAMS = {
    "ops": st.lists(_ops(), max_size=6),
    "structure": _structures(),
    "num_replicas": st.sampled_from([1, 2]),
    "way": st.sampled_from(["run", "run", "function", "run_steps"]),
}
_SETTINGS = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
_ADDS = [_Op("read", "mean", 0, None, False), _Op("assign_add", "mean", 1, 0, True)]
_BOTH = ("record", [("pair", ["mean", 0]), ("dict", ["mean", "own"])])


@settings(_SETTINGS, max_examples=6)
@given(**_PROGRAMS)
@example(ops=_ADDS, structure=_BOTH, num_replicas=2, way="run")
@example(ops=_ADDS, structure=_BOTH, num_replicas=1, way="run_steps")
def test_compiled_steps_return_what_numpy_does(
    ops: list[_Op], structure: Any, num_replicas: int, way: str
) -> None:
    _check(ops, structure, num_replicas, way)


@pytest.mark.slow
@settings(_SETTINGS, max_examples=6)
@given(**_PROGRAMS)
@example(ops=_ADDS, structure=_BOTH, num_replicas=2, way="run")
def test_eager_steps_return_what_numpy_does(
    ops: list[_Op], structure: Any, num_replicas: int, way: str
) -> None:
    sg.config.run_eagerly(True)
    try:
        _check(ops, structure, num_replicas, way)
    finally:
        sg.config.run_eagerly(False)


@pytest.mark.slow
@settings(_SETTINGS, max_examples=100)
@given(is_eager=st.booleans(), **_PROGRAMS)
def test_many_steps_return_what_numpy_does(
    ops: list[_Op], structure: Any, num_replicas: int, way: str, is_eager: bool
) -> None:
    sg.config.run_eagerly(is_eager)
    try:
        _check(ops, structure, num_replicas, way)
    finally:
        sg.config.run_eagerly(False)
