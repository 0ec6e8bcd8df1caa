"""Arguments of a replica function, split over replicas, shared or static, and its results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, Self

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.devices.shards import local_copy, require_exact_integers
from stratagem.errors import explain, invalid
from stratagem.execution.replica_context import ReplicaBatch
from stratagem.input.placement import PlacedBatches
from stratagem.variables.distributed import Mirrored, PerReplica, is_array, without_mirrored

if TYPE_CHECKING:
    from stratagem.devices.mesh import Topology


class Shaped(Protocol):
    """An array, or what describes one: a tracer, an abstract value, a traced argument."""

    @property
    def shape(self) -> Any:
        """Sizes of the axes."""
        ...

    @property
    def dtype(self) -> Any:
        """Type of the elements."""
        ...


class Static:
    """A static argument: strings, bools and None compare by value, other objects by identity."""

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value: Any = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, str | bytes | bool | type(None)):
            return bool(self.value == other.value)
        return self.value is other.value

    def __hash__(self) -> int:
        if isinstance(self.value, str | bytes | bool | type(None)):
            return hash(self.value)
        return id(self.value)


class HostOnly:
    """Takes the place of strings and other objects that differ between replicas or batches.

    A step that passes them by runs; one that uses them is refused.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return "HostOnly()"

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, because libraries look for attributes such as `shape` in each leaf.
        raise AttributeError(name if name.startswith("__") else _host_only(f"`.{name}` of "))

    def refuse(self, *_: object) -> NoReturn:
        """Raises TypeError."""
        raise TypeError(_host_only(""))

    __hash__ = object.__hash__
    __array__ = __jax_array__ = __bool__ = __str__ = __format__ = refuse
    __float__ = __int__ = __complex__ = __index__ = __len__ = __iter__ = __getitem__ = refuse
    __contains__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = refuse
    __add__ = __radd__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __sub__ = __rsub__ = refuse


def _host_only(what: str) -> str:
    return explain(
        f"A compiled step used {what}strings (or other objects) that each replica has of its own.",
        expected="numbers: JAX's programs take no strings, so these stay on the host.",
        fix="leave them out of the step and read them outside, with strategy.local_results(value); "
        "or turn them into integers in the data pipeline. To debug, sg.config.run_eagerly(True) "
        "passes them to the step.",
        code="SG904",
    )


class Leaf(NamedTuple):
    """Description of one argument of a program; a tuple, because it is hashed on every call."""

    split: bool  # True if each replica gets its own component
    shape: tuple[int, ...] | None = None  # with the replica axis if split; None if static
    dtype: Any = None
    is_weak: bool = False  # JAX weak type, which yields to other operands' dtypes
    lengths: tuple[int, ...] | None = None  # true leading sizes if padded
    static: Static | None = None

    @property
    def aval(self) -> jax.ShapeDtypeStruct | None:
        """Shape and dtype as JAX takes them; None if static."""
        if self.shape is None:
            return None
        return jax.ShapeDtypeStruct(self.shape, self.dtype, weak_type=self.is_weak)


_HOST_ONLY = Leaf(split=False, static=Static(HostOnly()))


class Arguments(NamedTuple):
    """Flattened arguments of one call; arrays are in the order of their leaves."""

    structure: Any  # of `(args, kwargs)`
    leaves: tuple[Leaf, ...]
    split: list[Any]
    shared: list[Any]
    known_batch: ReplicaBatch | None = None  # None if the leaves tell

    @property
    def batch(self) -> ReplicaBatch:
        """Rows of the padded split argument, else of the first one with rows; for tracing."""
        return _find_batch(self.leaves) if self.known_batch is None else self.known_batch

    def rebuild(self, split: list[Any], shared: list[Any]) -> tuple[Any, Any]:
        """Returns `(args, kwargs)` with other arrays in the places of split and shared leaves."""
        next_split, next_shared = iter(split), iter(shared)
        values: list[Any] = []
        for leaf in self.leaves:
            if leaf.static is not None:
                values.append(leaf.static.value)
            else:
                values.append(next(next_split) if leaf.split else next(next_shared))
        return jax.tree.unflatten(self.structure, values)

    def with_another_row(self) -> Arguments:
        """Returns a description in which each replica's padded part has one more row."""
        assert self.batch.size is not None
        leaves = [
            leaf._replace(shape=(leaf.shape[0], leaf.shape[1] + 1, *leaf.shape[2:]))
            if leaf.lengths is not None and leaf.shape is not None
            else leaf
            for leaf in self.leaves
        ]
        batch = dataclasses.replace(self.batch, size=self.batch.size + 1)
        return self._replace(leaves=tuple(leaves), known_batch=batch)


def _array_leaf(value: object, *, split: bool, lengths: tuple[int, ...] | None = None) -> Leaf:
    if isinstance(value, jax.Array):
        return Leaf(split, value.shape, value.dtype, bool(value.aval.weak_type), lengths)
    require_exact_integers([value], lambda _: "An argument")
    if isinstance(value, np.ndarray):
        dtype = jax.dtypes.canonicalize_dtype(value.dtype)
        return Leaf(split, value.shape, dtype, lengths=lengths)
    number = jax.numpy.asarray(value)
    return Leaf(split, (), number.dtype, not isinstance(value, np.generic))


def flatten_arguments(
    args: Iterable[Any], kwargs: Mapping[str, Any], *, num_replicas: int
) -> Arguments:
    """Flattens the arguments of a call.

    Arrays and Python numbers are traced; strings, bools, None and other objects are static.
    """
    flat, structure = jax.tree.flatten((tuple(args), kwargs), is_leaf=_is_leaf)
    leaves: list[Leaf] = []
    split: list[Any] = []
    shared: list[Any] = []
    for value in flat:
        if isinstance(value, jax.Array):  # first, because most are
            leaves.append(_array_leaf(value, split=False))
            shared.append(value)
            continue
        if isinstance(value, PerReplica):
            if value.objects and not any(map(is_array, value.objects)):
                leaves.append(_HOST_ONLY)
                continue
            leaves.append(_split_leaf(value, num_replicas))
            split.append(value.stacked)
            continue
        value = without_mirrored(value)
        if is_array(value) or (
            isinstance(value, int | float | complex) and not isinstance(value, bool)
        ):
            leaves.append(_array_leaf(value, split=False))
            shared.append(value)
        else:
            leaves.append(Leaf(split=False, static=Static(value)))
    return Arguments(structure, tuple(leaves), split, shared)


def batch_arguments(placed: PlacedBatches) -> Arguments:
    """Returns the arguments of a function of one batch, which the leaves describe.

    If `placed` holds several batches, the split arrays have steps on axis 0.
    """
    leaves: list[Leaf] = []
    remaining = iter(placed.arrays)
    for is_present in placed.is_array:
        if is_present:
            array = next(remaining)
            if _is_text(array):
                leaves.append(_HOST_ONLY)
                continue
            leaves.append(
                Leaf(
                    split=True,
                    shape=placed.step_shape(array),
                    dtype=array.dtype,
                    lengths=placed.lengths,
                )
            )
        else:
            leaves.append(Leaf(split=False, static=Static(None)))
    batch = jax.tree.unflatten(placed.structure, [0] * len(placed.is_array))
    return Arguments(
        structure=jax.tree.structure(((batch,), {})),
        leaves=tuple(leaves),
        split=[array for array in placed.arrays if not _is_text(array)],
        shared=[],
        known_batch=ReplicaBatch(size=placed.size, lengths=placed.lengths),
    )


def _find_batch(leaves: Iterable[Leaf]) -> ReplicaBatch:
    split = [leaf for leaf in leaves if leaf.split and leaf.shape is not None]
    for leaf in split:
        if leaf.lengths is not None and leaf.shape is not None:
            return ReplicaBatch(size=leaf.shape[1], lengths=leaf.lengths)
    for leaf in split:
        if leaf.shape is not None and len(leaf.shape) > 1:
            return ReplicaBatch(size=leaf.shape[1])
    for leaf in leaves:
        if leaf.shape and not leaf.split:
            return ReplicaBatch(size=leaf.shape[0])
    return ReplicaBatch()


def _is_leaf(value: object) -> bool:
    return value is None or isinstance(value, PerReplica | Mirrored)


def _is_text(array: object) -> bool:
    """Returns True for an array of the host that JAX cannot take, such as one of strings."""
    return isinstance(array, np.ndarray) and not is_array(array)


def _split_leaf(value: PerReplica, num_replicas: int) -> Leaf:
    if value.stacked is None:
        parts = [
            f"{part.dtype}{list(part.shape)}" if is_array(part) else type(part).__name__
            for part in value.objects or ()
        ]
        raise invalid(
            f"An argument of run is a PerReplica with parts {', '.join(parts)}.",
            expected="arrays of one dtype, equal in shape except for the leading size, "
            "because all replicas run one compiled program.",
            fix="use one shape and dtype, or debug with sg.config.run_eagerly(True).",
            code="SG408",
        )
    if value.stacked.shape[0] != num_replicas:
        raise invalid(
            f"An argument of run is a PerReplica with {value.stacked.shape[0]} replicas.",
            expected=f"one component for each of this strategy's {num_replicas} replicas.",
            fix="create it with this strategy.",
        )
    return _array_leaf(value.stacked, split=True, lengths=value.lengths)


def batch_of(
    args: Iterable[Any], kwargs: Mapping[str, Any], num_replicas: int
) -> ReplicaBatch | None:
    """Returns the rows of a call; None if its parts are too different to share a batch."""
    try:
        arguments: Arguments = flatten_arguments(args, kwargs, num_replicas=num_replicas)
    except ValueError:  # eager mode accepts these parts
        return None
    return arguments.batch


def true_batch(batch: ReplicaBatch | None, replica_id: int) -> ReplicaBatch | None:
    """Returns the batch with this replica's true rows, since eager replicas see no padding."""
    if batch is None or batch.lengths is None:
        return batch
    return ReplicaBatch(size=batch.lengths[replica_id], lengths=batch.lengths)


@dataclasses.dataclass
class Results:
    """The leaves of what a replica function returns; arrays become outputs of its program."""

    structure: Any
    leaves: list[tuple[bool, Any]]  # (True, output index) or (False, object)
    lengths: list[tuple[int, ...] | None]  # true leading sizes of padded leaves
    # Pairs of an output and the variable whose value after the step replaces it.
    late: list[tuple[int, Any]] = dataclasses.field(default_factory=list[tuple[int, Any]])

    @classmethod
    def of(cls, values: object, batch: ReplicaBatch) -> tuple[Self, list[jax.Array]]:
        """Flattens a result of `as_values`; also returns the outputs of one replica."""
        flat, structure = jax.tree.flatten(values, is_leaf=lambda leaf: leaf is None)
        results = cls(structure, [], [])
        outputs: list[jax.Array] = []
        for leaf in flat:
            if isinstance(leaf, keras.Variable):
                results.late.append((len(outputs), leaf))
                leaf = jnp.zeros(leaf.shape, leaf.dtype)
            if isinstance(leaf, HostOnly):
                leaf.refuse()
            if not is_array(leaf):
                results.leaves.append((False, leaf))
                results.lengths.append(None)
                continue
            value = jnp.asarray(leaf)
            is_padded = batch.is_padded and value.ndim > 0 and value.shape[0] == batch.size
            results.leaves.append((True, len(outputs)))
            results.lengths.append(batch.lengths if is_padded else None)
            outputs.append(value)
        return results, outputs

    @property
    def num_outputs(self) -> int:
        """Number of leaves that are arrays."""
        return sum(is_output for is_output, _ in self.leaves)

    def assembled(self, outputs: list[Any], topology: Topology) -> Any:
        """Returns the result of all replicas from the outputs; plain with one replica."""
        several = topology.num_replicas > 1
        leaves: list[Any] = []
        for (is_output, value), lengths in zip(self.leaves, self.lengths, strict=True):
            if not is_output:
                leaves.append(value)
            elif several:
                leaves.append(PerReplica(stacked=outputs[value], lengths=lengths))
            else:
                output = local_copy(outputs[value], topology)
                leaves.append(output if lengths is None else output[: lengths[0]])
        return jax.tree.unflatten(self.structure, leaves)
