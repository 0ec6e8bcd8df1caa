"""`PerReplica` and `Mirrored`: frozen pytrees of distributed values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.core import Tracer

from stratagem.devices.context_mesh import outside_context_mesh
from stratagem.devices.lockstep import wait_until_ready
from stratagem.errors import explain
from stratagem.logs import PublicDir, as_html, new_table

# In a notebook.
_MAX_SHOWN = 32
_MAX_CHARS = 200


class DistributedValues(PublicDir):
    """Base class of values with one component per replica.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> values = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
        >>> isinstance(values, sg.DistributedValues), strategy.local_results(values)
        (True, (Array(0, dtype=int32), Array(1, dtype=int32)))

    Source: TF 2.21 distribute.py (types), DistributedValues.
    """

    __slots__ = ()


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class PerReplica(DistributedValues):
    """One value per replica.

    Returned by `Strategy.run` and `distribute_values_from_function`. A value has one of three
    forms: `stacked` outside a step, `local` in `merge_call` of a compiled step, or `objects` for
    Python objects and for arrays whose shapes differ beyond the leading size.

    Args:
        stacked: array of shape (num_replicas, ...), sharded over the leading replica axis; with
            several processes, each holds the shards of its own replicas.
        lengths: true leading sizes, one per replica, if the components are padded; otherwise None.
        objects: the components of this process, in replica order.
        local: this replica's traced value in a compiled step.
        split_again: in an elastic group, returns the value for the members that are left.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> values = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group + 1)
        >>> values, int(strategy.reduce("sum", values, axis=None))
        (PerReplica[1 | 2], 3)

    Source: TF 2.21 values.py, PerReplica.
    """

    stacked: Any = None
    lengths: tuple[int, ...] | None = None
    objects: tuple[Any, ...] | None = None
    local: Any = None
    split_again: Callable[[], Any] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any], tuple[int, ...] | None]:
        """Returns the arrays for JAX; `lengths` are static."""
        return (self.stacked, self.objects, self.local), self.lengths

    @classmethod
    def tree_unflatten(cls, lengths: tuple[int, ...] | None, children: Sequence[Any]) -> PerReplica:
        """Rebuilds a value from the result of `tree_flatten`."""
        stacked, objects, local = children
        return cls(stacked=stacked, lengths=lengths, objects=objects, local=local)

    @property
    def components(self) -> tuple[Any, ...]:
        """Components of this process's replicas, without padding, in replica order."""
        if self.objects is not None:
            return self.objects
        if self.stacked is None:
            raise ValueError(
                explain(
                    "This PerReplica belongs to a compiled step, which sees only one component.",
                    expected="a value outside the step.",
                    fix="use strategy.reduce or all_gather inside merge_call.",
                    code="SG206",
                )
            )
        return self.parts(0)

    @outside_context_mesh
    def parts(self, axis: int) -> tuple[Any, ...]:
        """Returns the components of this process without padding, in replica order.

        Args:
            axis: axis of a component that holds its rows; 1 if axis 0 holds steps.

        Returns:
            The components, in replica order.
        """
        first, parts = _split_replica_axis(self.stacked)
        if self.lengths is None:
            return parts
        lengths = self.lengths[first : first + len(parts)]
        rows = (slice(None),) * axis
        return tuple(part[(*rows, slice(n))] for part, n in zip(parts, lengths, strict=True))

    def __repr__(self) -> str:
        if self.local is not None:
            return f"PerReplica(local={self.local!r})"
        if self.objects is None and not isinstance(self.stacked, jax.Array | np.ndarray):
            return f"PerReplica(stacked={self.stacked!r})"  # JAX may put any object into a pytree
        return "PerReplica[" + " | ".join(str(part) for part in self.components) + "]"

    def _repr_html_(self) -> str | None:
        is_array = isinstance(self.stacked, jax.Array | np.ndarray)
        if self.objects is None and (not is_array or isinstance(self.stacked, Tracer)):
            return None  # in a step there are no values
        first = 0 if self.objects is not None else _split_replica_axis(self.stacked)[0]
        table = new_table(None, ["replica", "shape", "dtype", "value"])
        for replica, part in enumerate(self.components[:_MAX_SHOWN], start=first):
            shape, dtype = getattr(part, "shape", "-"), getattr(part, "dtype", type(part).__name__)
            table.add_row(str(replica), str(shape), str(dtype), _short(part))
        more = len(self.components) - _MAX_SHOWN
        return as_html(["PerReplica", table, *([f"... {more} more"] if more > 0 else [])])

    def _refuse(self, use: str) -> NoReturn:
        raise ValueError(
            explain(
                f"A PerReplica was used as {use}, but it holds one value per replica.",
                expected="a plain value.",
                fix="use strategy.local_results, strategy.reduce or strategy.gather first, or pass "
                "it to strategy.run, whose function sees one component.",
                code="SG206",
            )
        )

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray[Any, Any]:
        self._refuse("an array")

    def __jax_array__(self) -> jax.Array:
        self._refuse("an array")

    def __bool__(self) -> bool:
        self._refuse("a truth value")

    def __format__(self, format_spec: str) -> str:
        return self._refuse("a number") if format_spec else repr(self)

    def _refuse_as_number(self, *_: object) -> NoReturn:
        self._refuse("a number")

    def _refuse_as_array(self, *_: object) -> NoReturn:
        self._refuse("an array")

    __float__ = __int__ = __complex__ = __index__ = __round__ = _refuse_as_number
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_as_number
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse_as_number
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _refuse_as_number
    __lt__ = __le__ = __gt__ = __ge__ = _refuse_as_number
    __matmul__ = __rmatmul__ = __getitem__ = __iter__ = __len__ = _refuse_as_array


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."


def _split_replica_axis(stacked: jax.Array | np.ndarray) -> tuple[int, tuple[Any, ...]]:
    """Returns the first replica of this process and the parts of all its replicas.

    Does not move data if the array is sharded over the replica axis.
    """
    if isinstance(stacked, jax.Array) and not isinstance(stacked, Tracer):
        if stacked.is_fully_replicated and not stacked.is_fully_addressable:
            # XLA replicates an array without elements to every device.
            own = _replicas_of_process(stacked)
            return own[0], tuple(stacked.addressable_data(0)[0] for _ in own)
        first: dict[int, Any] = {}  # one shard per replica: all its devices hold copies
        for shard in stacked.addressable_shards:
            first.setdefault(shard.index[0].start or 0, shard)
        starts = sorted(first)
        shards = [first[start] for start in starts]
        if not stacked.is_fully_addressable:
            wait_until_ready(stacked)
            return starts[0], tuple(shard.data[0] for shard in shards)
        if starts == list(range(stacked.shape[0])):
            return 0, tuple(shard.data[0] for shard in shards)
    return 0, tuple(stacked[index] for index in range(stacked.shape[0]))


def _replicas_of_process(stacked: jax.Array) -> list[int]:
    sharding: Any = stacked.sharding
    devices: list[jax.Device] = [*sharding.mesh.devices.flat]
    group_size = len(devices) // stacked.shape[0]
    process = jax.process_index()
    indices = [index for index, one in enumerate(devices) if one.process_index == process]
    return sorted({index // group_size for index in indices})


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Mirrored(DistributedValues):
    """The same value on every replica.

    Returned by `extended.reduce_to`, accepted by `extended.update`. Works as an array anywhere.

    Args:
        value: the value of one copy.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> values = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group + 1)
        >>> total = strategy.extended.reduce_to("sum", values, destinations=None)
        >>> type(total).__name__, int(total + 10)
        ('Mirrored', 13)

    Source: TF 2.21 values.py, Mirrored.
    """

    value: Any

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """Returns the array for JAX."""
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Mirrored:
        """Rebuilds a value from the result of `tree_flatten`."""
        return cls(children[0])

    def __jax_array__(self) -> jax.Array:
        return jax.numpy.asarray(self.value)

    def __array__(
        self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        return np.array(self.value, dtype=dtype, copy=copy)

    def _repr_html_(self) -> str:
        array = jax.numpy.asarray(self.value)
        table = new_table(None, ["replica", "shape", "dtype", "value"])
        table.add_row("all", str(array.shape), str(array.dtype), _short(array))
        return as_html(["Mirrored", table])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "value":  # during construction or copying
            raise AttributeError(name)
        return getattr(jax.numpy.asarray(self.value), name)

    def __format__(self, format_spec: str) -> str:
        return format(self.value, format_spec)


def _add_operator(name: str) -> None:
    """Adds an array operator to `Mirrored`, because Python looks operators up on the class."""

    def operator(self: Mirrored, *others: object) -> Any:
        plain = [other.value if isinstance(other, Mirrored) else other for other in others]
        return getattr(jax.numpy.asarray(self.value), name)(*plain)

    setattr(Mirrored, name, operator)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHERS = ("neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne", "getitem", "len", "iter")
_CONVERSIONS = ("bool", "float", "int", "index")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS, *_CONVERSIONS):
    _add_operator(f"__{_name}__")
