"""`VariableClient`: one process's access to remote variables, their caches and optimizers."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.errors import explain, invalid
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import (
    ShardLayout,
    ShardPlacer,
    layout_of_keys,
)
from stratagem.parameter_server.server.shards import Pushed, UpdateMode, UpdateRule

if TYPE_CHECKING:
    import keras

# Cache of reads from parameter servers, for the duration of a function.


class CachedReads:
    """Copies of values, updated with own writes. Tables with row lookups are never cached."""

    def __init__(self, client: ServerClient) -> None:
        self._client = client
        self._values: dict[str, np.ndarray] = {}
        self._scalars: dict[int, dict[str, np.ndarray]] = {}

    def pull(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        """Returns whole variables or slots by name; fetches those that are not cached."""
        missing = [name for name in names if name not in self._values]
        pulled = self._client.pull(missing) if missing else {}
        self._keep(pulled)
        return {name: pulled[name] if name in pulled else self._values[name] for name in names}

    def scalars(self, server: int) -> Mapping[str, np.ndarray]:
        """Returns an optimizer's scalars; asks `server` if they are not cached."""
        if server not in self._scalars:
            self._scalars[server] = dict(self._client.scalars(server))
        return self._scalars[server]

    def note_assigned(self, name: str, value: np.ndarray, sign: int) -> None:
        """Records a write by this process: `sign` 0 sets the value, 1 adds it, -1 subtracts it."""
        if not sign:
            self._keep({name: value.copy()})
        elif name in self._values:
            self._values[name] = np.asarray(self._values[name] + sign * value, value.dtype)

    def note_scalar(self, name: str, value: np.ndarray) -> None:
        """Records that this process set an optimizer scalar on all servers."""
        for scalars in self._scalars.values():
            scalars[name] = value

    def note_pushed(self, names: Iterable[str], brought: Mapping[str, np.ndarray]) -> None:
        """Records that servers applied gradients of this process to the variables `names`.

        `brought` holds values after the update; other updated values are fetched when read.
        """
        updated = {*names}
        for name in list(self._values):
            if name in updated or name.rpartition(":")[0] in updated:  # also slots
                del self._values[name]
        self._scalars.clear()
        self._keep(brought)

    def _keep(self, values: Mapping[str, np.ndarray]) -> None:
        for name, value in values.items():
            if not self._client.placement_of(name).has_rows:
                self._values[name] = value


# Places of remote variables on servers, and a step's outgoing gradients.


@dataclasses.dataclass(frozen=True)
class Stored:
    """Place of a variable or slot on the servers, by name; "name:slot" for a slot."""

    name: str


@dataclasses.dataclass(frozen=True)
class Scalar:
    """Place of a variable that is an optimizer scalar on each server; reads ask `server`."""

    name: str
    server: int = 0


@dataclasses.dataclass(frozen=True)
class Unplaced:
    """Place of a variable that is not on the servers yet. Most scalars end up in an optimizer."""

    value: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """Gradient of a variable, summed over the replicas; the servers' `optimizer` applies it."""

    variable: Any
    optimizer: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradient:
    """Row ids of a table, or gradients of these rows, which directly follow the ids."""

    table: Any
    is_ids: bool
    optimizer: str = ""


@dataclasses.dataclass(frozen=True, eq=False)
class Assigned:
    """Value that a step sets a variable to before gradients for `optimizer`; or a difference."""

    variable: Any
    optimizer: str
    is_added: bool


@dataclasses.dataclass(frozen=True)
class IsFinite:
    """False if the gradients for `optimizer` that follow must not be used."""

    optimizer: str


@dataclasses.dataclass(frozen=True)
class OptimizerScalar:
    """Optimizer scalar, by server-side name, to use with the gradients that follow."""

    name: str


def name_of(variable: Any) -> str:
    """Returns the server-side name of a variable or optimizer scalar that has a place."""
    return variable.place.name


class VariableOnWorkerError(RuntimeError, ValueError):
    """Raised for a variable created in a function on a worker. A ValueError, as in TensorFlow."""


class VariableClient:
    """Reads and writes remote variables, one by one and for whole steps.

    `placer` places new variables; None on a worker, which creates none. `is_coordinator` is True if
    all other processes get their optimizers from this one.

    `is_in_step` is True while a step runs: variables then return the fetched values. `num_writes`
    counts changes made here outside of steps.

    On a worker, `known`, `collected`, `seeds` and `resources` hold its objects by the coordinator's
    names: remote variables, metric counts, seeds, and per-worker objects.
    """

    def __init__(
        self,
        client: ServerClient,
        placer: ShardPlacer | None,
        mode: UpdateMode,
        *,
        is_coordinator: bool = False,
    ) -> None:
        self.client = client
        self.mode = mode
        self.num_writes = 0
        self.is_coordinator = is_coordinator
        self._placer = placer
        self.known: dict[str, Any] = {}
        self.collected: dict[int, Any] = {}
        self.seeds: dict[int, Any] = {}
        self.resources: dict[int, Any] = {}
        self._names: set[str] = set()
        self._optimizers: dict[str, weakref.ref[Any] | None] = {}
        self._cached: CachedReads | None = None
        self.is_in_step = False
        self.named: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    @property
    def creates_variables(self) -> bool:
        """True unless this process is a worker of a coordinator."""
        return self._placer is not None

    def require_coordinator(self, path: str) -> None:
        """Raises a VariableOnWorkerError for the variable at `path` if this process is a worker."""
        if not self.creates_variables:
            raise VariableOnWorkerError(
                explain(
                    f"Variable {path!r} was created in a function on a worker.",
                    expected="variables created by the coordinator in the strategy's scope, so "
                    "that all workers share them.",
                    fix="create the variable before you schedule the function.",
                    code="SG608",
                )
            )

    def create(self, variable: Any, initial: np.ndarray | Callable[[int, int], np.ndarray]) -> None:
        """Creates a variable on the servers, unless they have it.

        `initial` is its value, or a function that returns a range of its rows.
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

    def create_keyed(self, variable: Any, table: Mapping[str, Any], *, skips_zero: bool) -> None:
        """Creates a keyed table on all servers, unless they have it; see `KeyLayout`."""
        self.require_coordinator(variable.path)
        servers, most = range(self.client.num_servers), table.get("max_rows")
        if most is not None and most < len(servers):
            raise invalid(
                f"The keyed table {variable.path!r} divides max_rows={most} over "
                f"{len(servers)} servers.",
                expected="at least one row for each server.",
                fix="raise max_rows, or omit it for no limit.",
            )
        name = self._name_for(variable.path)
        placement = layout_of_keys(
            name, variable.shape[1:], str(variable.dtype), servers, table, skips_zero=skips_zero
        )
        self.client.create(placement, None)
        variable.place = Stored(name)
        self.named[name] = variable

    def splits(self, path: str, shape: tuple[int, ...], dtype: str) -> bool:
        """Returns True if a new variable will have shards on several servers."""
        return self._placer is not None and self._placer.splits(path, shape, dtype)

    def place(self, variable: Any) -> None:
        """Moves a variable to the servers if it is not there yet."""
        if isinstance(variable.place, Unplaced):
            self.create(variable, variable.place.value)

    def placement_of(self, variable: Any) -> ShardLayout | None:
        """Returns the layout of a variable, or of a slot's variable; None for scalars."""
        if not isinstance(variable.place, Stored):
            return None
        return self.client.placement_of(variable.place.name)

    def read(self, variable: Any) -> Any:
        """Returns a variable's current value, or None if it has none."""
        where = variable.place
        if isinstance(where, Unplaced):
            return where.value
        if isinstance(where, Scalar):
            return self.scalars(where.server)[where.name]
        return None if where is None else self.pull([where.name])[where.name]

    def pull(self, names: Sequence[str]) -> Mapping[str, np.ndarray]:
        """Returns whole variables or slots by name, cached in a block of `caching_reads`."""
        return (self._cached or self.client).pull(names)

    def scalars(self, server: int) -> Mapping[str, np.ndarray]:
        """Returns an optimizer's scalars from a server, cached in a block of `caching_reads`."""
        return (self._cached or self.client).scalars(server)

    def push(self, pull: Sequence[str], **gradients: Any) -> Pushed:
        """Sends gradients; see `ServerClient.push`.

        `optimizers` has an entry for each variable with a gradient.
        """
        pushed = self.client.push(**gradients, pull=pull)
        if self._cached is not None:
            self._cached.note_pushed(gradients["optimizers"], pushed.values)
        return pushed

    @property
    def is_caching(self) -> bool:
        """True if reads are cached."""
        return self._cached is not None

    @contextlib.contextmanager
    def caching_reads(self) -> Generator[None]:
        """Caches reads in a `with` block, including those of steps: one request per variable."""
        if self._cached is not None:
            raise invalid(
                "cache_variable_reads() was called inside a block of cache_variable_reads().",
                expected="one such block at a time.",
                fix="remove the inner block.",
            )
        self._cached = CachedReads(self.client)
        try:
            yield
        finally:
            self._cached = None

    def scatter(self, variable: Any, ids: np.ndarray, values: np.ndarray, *, sign: int = 0) -> None:
        """Writes rows of a variable on the servers; see `ServerClient.scatter`."""
        self.num_writes += 1
        self.client.scatter(name_of(variable), ids, values, sign=sign)

    def shards(self, variable: Any) -> tuple[ShardLayout, ...]:
        """Returns the layouts of a variable's shards; none for an unsplit variable or a slot.

        Registers the shards under their own names.
        """
        whole = self.placement_of(variable)
        if whole is None or whole.is_keyed or not whole.is_split:
            return ()
        if whole.name != name_of(variable):
            return ()
        shards = tuple(whole.shard(number) for number in range(len(whole.rows)))
        for one in shards:
            self.client.know(one)
        self._names.update(one.name for one in shards)
        return shards

    def assign(self, variable: Any, value: object, *, sign: int = 0) -> None:
        """Writes a variable: `sign` 0 sets it, 1 adds the value, -1 subtracts it.

        `value` is broadcast to the variable's shape; a ValueError is raised if that fails.
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
        """Makes servers write their journals, if any, so that they can restart from this state."""
        if self.creates_variables:
            self.client.journal()

    def name_optimizer(self, optimizer: keras.optimizers.Optimizer) -> str:
        """Returns a server-side name for an optimizer: unique, and equal in each run of a program.

        The servers delete the optimizer once it is garbage-collected here.
        """
        name = _numbered(type(optimizer).__name__.lower(), self._optimizers)
        self._optimizers[name] = weakref.ref(optimizer)
        return name

    def set_rule(self, rule: UpdateRule, variables: Sequence[Any], optimizer: str) -> None:
        """Sends the optimizer of `variables` to the servers, and places variables if necessary.

        Also deletes optimizers there that were garbage-collected here.
        """
        for variable in variables:
            self.place(variable)
        names = [name_of(variable) for variable in variables]
        self.client.set_rule(rule, names, self.mode, optimizer)
        for name, one in self._optimizers.items():
            if self.is_coordinator and one is not None and one() is None:
                self.client.drop_rule(name)
                self._optimizers[name] = None

    def _name_for(self, path: str) -> str:
        """Returns a unique variable name; the same in each run of a program."""
        name = _numbered(path, self._names)
        self._names.add(name)
        return name


def _numbered(name: str, taken: Collection[str]) -> str:
    """Returns a name that is not taken: the given one, or the next one with a number."""
    found, number = name, 1
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def _whole(variable: Any, value: np.ndarray) -> np.ndarray:
    """Returns a value in the variable's shape; a single server could not detect a mismatch."""
    if value.shape == tuple(variable.shape):
        return value
    try:
        return np.ascontiguousarray(np.broadcast_to(value, variable.shape))
    except ValueError:
        raise invalid(
            f"Variable {variable.path!r} cannot take a value of shape {value.shape}.",
            expected=f"shape {tuple(variable.shape)}, or a shape that broadcasts to it.",
            fix="reshape the value to variable.shape.",
        ) from None
