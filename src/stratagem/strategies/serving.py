"""One process's view of the variables that parameter servers hold."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from stratagem.execution import Ids, Trace
from stratagem.messages import explain
from stratagem.servers import Placement, Placer, ServedVariables, UpdateRule

__all__ = ["Gradient", "RowGradient", "Scalar", "ServedVariable", "Serving", "Stored", "Unplaced"]


@dataclasses.dataclass(frozen=True)
class Stored:
    """A variable is on the servers.

    Args:
        name: its name there; "name:slot" for what an optimizer keeps for a variable.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A variable is one of the numbers that each server's optimizer keeps once.

    Args:
        name: its name there.
    """

    name: str


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """A variable is not on the servers yet: most scalars turn out to be an optimizer's.

    Args:
        value: its value.
    """

    value: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """What a step hands out: the gradient of a variable, summed over the replicas.

    Args:
        variable: the variable.
    """

    variable: Any


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """What a step hands out: the ids of rows of a table, or the gradients of these rows.

    Args:
        table: the variable.
        is_ids: which of the two; the gradients come right after the ids.
    """

    table: Any
    is_ids: bool


class ServedVariable(Protocol):
    """A Keras variable whose value is on the servers.

    Attributes:
        place: where; None until it has a value.
        held: its value while a step of this process runs: one copy, or a component a replica.
    """

    place: Stored | Scalar | Unplaced | None
    held: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        ...

    @property
    def dtype(self) -> str:
        """Its dtype."""
        ...

    @property
    def path(self) -> str:
        """Its path in its model."""
        ...

    @property
    def has_rows(self) -> bool:
        """Whether single rows of it are asked for."""
        ...

    @property
    def is_added_to(self) -> bool:
        """Whether what a step writes counts as a difference to what it has read."""
        ...

    def hold(self, value: np.ndarray) -> None:
        """Keeps a value for a step."""
        ...

    def whole_held(self) -> np.ndarray:
        """The value after the step; of components their mean."""
        ...


class _InStep(threading.local):
    """Whether a step runs in this thread: variables answer with the values that it has read."""

    value = False


class Serving:
    """Reads and changes served variables, one by one and for whole steps.

    Args:
        client: of the servers.
        placer: chooses where new variables are; None on a worker, which makes none.
        num_replicas: of this process.

    Of a worker, `known`, `collected`, `kept` and `resources` are the objects that it has, by what
    the coordinator calls them: served variables, its counts, its seeds, and what it was told to
    make.
    """

    def __init__(self, client: ServedVariables, placer: Placer | None, num_replicas: int) -> None:
        self.client = client
        self._placer = placer
        self._placements: dict[str, Placement] = {}
        self.known: dict[str, Any] = {}
        self.collected: dict[int, Any] = {}
        self.kept: dict[int, Any] = {}
        self.resources: dict[int, Any] = {}
        self._num_replicas = num_replicas
        self._names: set[str] = set()
        self._in_step = _InStep()
        self.named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    @property
    def is_in_step(self) -> bool:
        """Whether a step runs in this thread."""
        return self._in_step.value

    def create(
        self, variable: ServedVariable, initial: np.ndarray | Callable[[int, int], np.ndarray]
    ) -> None:
        """Makes a variable on the servers, unless they have it.

        Args:
            variable: the variable.
            initial: its value, or what makes rows of it.
        """
        if self._placer is None:
            raise RuntimeError(
                explain(
                    f"Variable {variable.path!r} was created in a function on a worker.",
                    expected="variables that are created by the coordinator, in the strategy's "
                    "scope: the servers share them out among all workers.",
                    fix="create it before the function is scheduled.",
                )
            )
        name = self._name_for(variable.path)
        placement = self._placer.place(
            name, variable.shape, variable.dtype, has_rows=variable.has_rows
        )
        self.client.create(placement, initial)
        self._placements[name] = placement
        variable.place = Stored(name)
        self.named[name] = variable

    def place(self, variable: ServedVariable) -> None:
        """Puts a variable on the servers that is not there yet."""
        if isinstance(variable.place, Unplaced):
            self.create(variable, variable.place.value)

    def placement_of(self, variable: ServedVariable) -> Placement | None:
        """Returns where a variable is, or the one that it is a slot of; None for scalars."""
        if not isinstance(variable.place, Stored):
            return None
        return self._placements[variable.place.name.partition(":")[0]]

    def read(self, variable: ServedVariable) -> Any:
        """Returns a variable's value as it is now; None if it has none."""
        where = variable.place
        if isinstance(where, Unplaced):
            return where.value
        if isinstance(where, Scalar):
            return self.client.scalars()[where.name]
        return None if where is None else self.client.pull([where.name])[where.name]

    def assign(self, variable: ServedVariable, value: Any, *, sign: int = 0) -> None:
        """Sets a variable, or changes it.

        Args:
            variable: the variable.
            value: of its shape.
            sign: 0 sets it; 1 adds the value, -1 subtracts it.
        """
        value = np.asarray(value, np.dtype(variable.dtype))
        where = variable.place
        if isinstance(where, Stored):
            self.client.assign(where.name, value, sign=sign)
            return
        if sign:
            value = np.asarray(self.read(variable) + sign * value, np.dtype(variable.dtype))
        if isinstance(where, Scalar):
            self.client.set_scalar(where.name, value)
        else:
            variable.place = Unplaced(value)

    def set_rule(self, rule: UpdateRule, variables: Sequence[ServedVariable]) -> None:
        """Gives the servers the optimizer of variables.

        Args:
            rule: the optimizer's.
            variables: those that it trains.
        """
        for variable in variables:
            self.place(variable)
        self.client.set_rule(rule, [_name_of(variable) for variable in variables])

    def run(
        self,
        trace: Trace,
        ids_of: Callable[[], list[Any]],
        call: Callable[[list[Any]], list[Any]],
    ) -> None:
        """Runs one step; see `stratagem.execution.Exchange`."""
        variables = [one for one in (*trace.read_only, *trace.written) if _is_served(one)]
        before = self._pull(variables)
        with self._step_with(variables, before):
            rows = self._pull_rows(trace, ids_of() if trace.lookups else [])
            sent = call(rows)
            is_written = {id(variable) for variable in trace.written}
            after = {
                id(variable): variable.whole_held()
                for variable in variables
                if id(variable) in is_written
            }
        self._push(trace, sent)
        for variable in variables:
            if id(variable) not in after:
                continue
            new = after[id(variable)]
            if variable.is_added_to or id(variable) in trace.added_to:
                self.assign(variable, new - before[id(variable)], sign=1)
            else:
                self.assign(variable, new)

    def _pull(self, variables: Sequence[ServedVariable]) -> dict[int, Any]:
        """The values of variables, by identity."""
        for variable in variables:
            self.place(variable)
        names = [one.place.name for one in variables if isinstance(one.place, Stored)]
        values: Mapping[str, Any] = self.client.pull(names) if names else {}
        scalars: Mapping[str, Any] = {}
        if any(isinstance(one.place, Scalar) for one in variables):
            scalars = self.client.scalars()
        return {
            id(one): (values if isinstance(one.place, Stored) else scalars)[_name_of(one)]
            for one in variables
        }

    def _pull_rows(self, trace: Trace, ids: list[Any]) -> list[Any]:
        rows: list[Any] = []
        for lookup, own_ids in zip(trace.lookups, ids, strict=True):
            if own_ids is None:  # a lookup that nothing depends on
                shape = lookup.shape
                if self._num_replicas > 1:
                    shape = (self._num_replicas, *shape)
                rows.append(np.zeros(shape, lookup.dtype))
                continue
            numbers = np.asarray(own_ids)
            num_rows = lookup.table.shape[0]
            numbers = np.where(numbers < 0, numbers + num_rows, numbers)
            rows.append(self.client.pull_rows(_name_of(lookup.table), numbers))
        return rows

    def _push(self, trace: Trace, sent: list[Any]) -> None:
        whole: dict[str, np.ndarray] = {}
        ids: dict[str, np.ndarray] = {}
        rows: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for what, value in zip(trace.sent, sent, strict=True):
            if isinstance(what, Ids):
                continue
            array = np.asarray(value)
            if self._num_replicas > 1:  # the same on all
                array = array[0]
            if isinstance(what, Gradient):
                whole[_name_of(what.variable)] = array
            elif what.is_ids:
                ids[_name_of(what.table)] = array
            else:
                name = _name_of(what.table)
                rows[name] = (ids[name], array)
        if whole or rows:
            self.client.push(whole, rows)

    @contextlib.contextmanager
    def _step_with(
        self, variables: Sequence[ServedVariable], values: Mapping[int, Any]
    ) -> Generator[None]:
        """Lets variables answer with these values in this thread."""
        for variable in variables:
            variable.hold(values[id(variable)])
        self._in_step.value = True
        try:
            yield
        finally:
            self._in_step.value = False
            for variable in variables:
                variable.held = None

    def _name_for(self, path: str) -> str:
        """A name that no other variable has; the same each time a program runs."""
        name, number = path, 1
        while name in self._names:
            number += 1
            name = f"{path}_{number}"
        self._names.add(name)
        return name


def _is_served(variable: Any) -> bool:
    return hasattr(variable, "whole_held")


def _name_of(variable: Any) -> str:
    return variable.place.name
