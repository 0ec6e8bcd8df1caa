"""One process's view of the variables that parameter servers hold."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.servers import (
    Pushed,
    ServerClient,
    ShardLayout,
    ShardPlacer,
    UpdateMode,
    UpdateRule,
)
from stratagem.strategies.cached_reads import CachedReads
from stratagem.strategies.served_values import Scalar, ServedVariable, Stored, Unplaced, name_of

__all__ = ["VariableClient", "VariableOnWorkerError"]


class VariableOnWorkerError(RuntimeError, ValueError):
    """Raised for a variable that a function on a worker creates; TensorFlow's is a ValueError."""


class VariableClient:
    """Reads and changes served variables, one by one and for whole steps.

    Args:
        client: of the servers.
        placer: chooses where new variables are; None on a worker, which makes none.
        mode: when the servers apply gradients.
        has_journals: whether servers keep journals.
        is_coordinator: whether all other processes have their optimizers from here.

    `is_in_step` tells whether a step runs: variables answer with the values that it has read then.
    `num_writes` counts what was changed here other than by steps.

    Of a worker, `known`, `collected`, `kept` and `resources` are the objects that it has, by what
    the coordinator calls them: served variables, its counts, its seeds, and what it was told to
    make.
    """

    def __init__(
        self,
        client: ServerClient,
        placer: ShardPlacer | None,
        mode: UpdateMode,
        *,
        has_journals: bool = False,
        is_coordinator: bool = False,
    ) -> None:
        self.client = client
        self.mode = mode
        self.num_writes = 0
        self._has_journals = has_journals
        self._is_coordinator = is_coordinator
        self._placer = placer
        self.known: dict[str, Any] = {}
        self.collected: dict[int, Any] = {}
        self.kept: dict[int, Any] = {}
        self.resources: dict[int, Any] = {}
        self._names: set[str] = set()
        self._optimizers: dict[str, weakref.ref[Any] | None] = {}
        self._cached: CachedReads | None = None
        self.is_in_step = False
        self.named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def require_coordinator(self, path: str) -> None:
        """Raises on a worker.

        Args:
            path: of the variable that is to be created.

        Raises:
            VariableOnWorkerError: this process is a worker.
        """
        if self._placer is None:
            raise VariableOnWorkerError(
                explain(
                    f"Variable {path!r} was created in a function on a worker.",
                    expected="variables that are created by the coordinator, in the strategy's "
                    "scope: the servers share them out among all workers.",
                    fix="create it before the function is scheduled.",
                )
            )

    def create(
        self, variable: ServedVariable, initial: np.ndarray | Callable[[int, int], np.ndarray]
    ) -> None:
        """Makes a variable on the servers, unless they have it.

        Args:
            variable: the variable.
            initial: its value, or what makes rows of it.
        """
        self.require_coordinator(variable.path)
        assert self._placer is not None
        name = self._name_for(variable.path)
        placement = self._placer.place(
            name, variable.shape, variable.dtype, has_rows=variable.has_rows
        )
        self.client.create(placement, initial)
        variable.place = Stored(name)
        self.named[name] = variable

    def place(self, variable: ServedVariable) -> None:
        """Puts a variable on the servers that is not there yet."""
        if isinstance(variable.place, Unplaced):
            self.create(variable, variable.place.value)

    def placement_of(self, variable: ServedVariable) -> ShardLayout | None:
        """Returns where a variable is, or the one that it is a slot of; None for scalars."""
        if not isinstance(variable.place, Stored):
            return None
        return self.client.placement_of(variable.place.name)

    def read(self, variable: ServedVariable) -> Any:
        """Returns a variable's value as it is now; None if it has none."""
        where = variable.place
        if isinstance(where, Unplaced):
            return where.value
        if isinstance(where, Scalar):
            return self.scalars(where.server)[where.name]
        return None if where is None else self.pull([where.name])[where.name]

    def pull(self, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Returns whole variables, or what was read of them in a block of `caching_reads`.

        Args:
            names: theirs, or of slots.
        """
        return (self._cached or self.client).pull(names)

    def scalars(self, server: int) -> Mapping[str, np.ndarray]:
        """Returns what an optimizer keeps once, or what was read of it in such a block.

        Args:
            server: the one that is asked.
        """
        return (self._cached or self.client).scalars(server)

    def push(
        self,
        *gradients: Any,
        optimizers: Mapping[str, str],
        pull: Sequence[str],
        scalars: Mapping[str, float] | None = None,
    ) -> Pushed:
        """Sends gradients; see `ServerClient.push`.

        Args:
            gradients: of whole variables, and of rows.
            optimizers: which one applies them, by name of the variable.
            pull: names of variables that are wanted as they are then.
            scalars: what optimizers keep once, where this process knows it better.
        """
        pushed = self.client.push(*gradients, pull=pull, optimizers=optimizers, scalars=scalars)
        if self._cached is not None:
            self._cached.note_pushed(optimizers, pushed.values)
        return pushed

    @property
    def is_caching(self) -> bool:
        """Whether reads are answered from what was read before."""
        return self._cached is not None

    @contextlib.contextmanager
    def caching_reads(self) -> Generator[None]:
        """Lets reads in a `with` block, of steps too, ask the servers once for each variable.

        Raises:
            ValueError: in such a block.
        """
        if self._cached is not None:
            raise ValueError(
                explain(
                    "Reads of variables were to be cached in a block in which they are.",
                    expected="one block of cache_variable_reads() at a time.",
                    fix="leave the inner one out.",
                )
            )
        self._cached = CachedReads(self.client)
        try:
            yield
        finally:
            self._cached = None

    def read_rows(self, variable: ServedVariable, ids: np.ndarray) -> np.ndarray:
        """Returns rows of a variable as they are now.

        Args:
            variable: the variable, which is on the servers.
            ids: integers of any shape.

        Returns:
            Array of shape (*ids.shape, ...).
        """
        return self.client.pull_rows(name_of(variable), ids)

    def scatter(
        self, variable: ServedVariable, ids: np.ndarray, values: np.ndarray, *, sign: int = 0
    ) -> None:
        """Sets rows of a variable, or changes them.

        Args:
            variable: the variable, which is on the servers.
            ids: of shape (k,); rows that come more than once are added up, or the last one counts.
            values: of shape (k, ...).
            sign: 0 sets them; 1 adds the values, -1 subtracts them.
        """
        self.num_writes += 1
        self.client.scatter(name_of(variable), ids, values, sign=sign)

    def shards(self, variable: ServedVariable) -> tuple[ShardLayout, ...]:
        """Returns where the shards of a variable are; none of one that is not split, and of a slot.

        Args:
            variable: the variable. The shards are known by their own names afterwards.
        """
        whole = self.placement_of(variable)
        if whole is None or whole.name != name_of(variable) or len(whole.rows) == 1:
            return ()
        shards = tuple(whole.shard(number) for number in range(len(whole.rows)))
        for one in shards:
            self.client.know(one)
        self._names.update(one.name for one in shards)
        return shards

    def assign(self, variable: ServedVariable, value: Any, *, sign: int = 0) -> None:
        """Sets a variable, or changes it.

        Args:
            variable: the variable.
            value: of its shape, or one that becomes that by broadcasting.
            sign: 0 sets it; 1 adds the value, -1 subtracts it.

        Raises:
            ValueError: another shape.
        """
        value = _whole(variable, np.asarray(value, np.dtype(variable.dtype)))
        self.num_writes += 1
        where = variable.place
        if isinstance(where, Stored):
            self.client.assign(where.name, value, sign=sign)
            if self._cached is not None:
                self._cached.note_assigned(where.name, value, sign)
            return
        if sign:
            value = np.asarray(self.read(variable) + sign * value, np.dtype(variable.dtype))
        if isinstance(where, Scalar):
            self.client.set_scalar(where.name, value)
            if self._cached is not None:
                self._cached.note_scalar(where.name, value)
        else:
            variable.place = Unplaced(value)

    def secure(self) -> None:
        """Has the servers write what they hold: from now on they can be started again with it."""
        if self._has_journals:
            self.client.journal()

    def name_optimizer(self, optimizer: Any) -> str:
        """Returns a name that no other optimizer has whose variables are on the servers.

        Args:
            optimizer: the optimizer; once nobody has it any more, the servers forget it.

        Returns:
            The same each time a program runs, whatever names Keras has given.
        """
        kind = type(optimizer).__name__.lower()
        name, number = kind, 1
        while name in self._optimizers:
            number += 1
            name = f"{kind}_{number}"
        self._optimizers[name] = weakref.ref(optimizer)
        return name

    def set_rule(
        self, rule: UpdateRule, variables: Sequence[ServedVariable], optimizer: str
    ) -> None:
        """Gives the servers the optimizer of variables.

        Args:
            rule: the optimizer's.
            variables: those that it trains.
            optimizer: its name.
        """
        for variable in variables:
            self.place(variable)
        names = [name_of(variable) for variable in variables]
        self.client.set_rule(rule, names, self.mode, optimizer)
        for name, one in self._optimizers.items():
            if self._is_coordinator and one is not None and one() is None:
                self.client.drop_rule(name)
                self._optimizers[name] = None

    def _name_for(self, path: str) -> str:
        """A name that no other variable has; the same each time a program runs."""
        name, number = path, 1
        while name in self._names:
            number += 1
            name = f"{path}_{number}"
        self._names.add(name)
        return name


def _whole(variable: ServedVariable, value: np.ndarray) -> np.ndarray:
    """A value in the shape of its variable: one server alone would notice that it is another."""
    if value.shape == tuple(variable.shape):
        return value
    try:
        return np.ascontiguousarray(np.broadcast_to(value, variable.shape))
    except ValueError:
        raise ValueError(
            explain(
                f"Variable {variable.path!r} was to be changed by a value of shape {value.shape}.",
                expected=f"shape {tuple(variable.shape)}, or one that broadcasts to it.",
                fix="compare with variable.shape.",
            )
        ) from None
