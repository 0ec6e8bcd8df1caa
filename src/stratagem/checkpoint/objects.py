"""Objects that checkpoints can hold, taken apart into variables and JSON state."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.devices.lockstep import compute_on_every_process, is_multi_process
from stratagem.errors import explain, invalid
from stratagem.variables.registry import home_of
from stratagem.variables.sharded_variable import ShardedVariable

if TYPE_CHECKING:
    from jax.typing import ArrayLike

# Pytrees of arrays in checkpoints: leaves by path, and rebuilding the restored tree.

_ONLY_LEAF = "value"
_GENERATORS = ("threefry2x32", "rbg", "unsafe_rbg")
_NUMBERS = (bool, int, float, complex)


class ArrayLeaf:
    """An array, `jax.ShapeDtypeStruct`, random key or number of a pytree, and its replacement."""

    def __init__(self, path: str, value: ArrayLike | jax.ShapeDtypeStruct) -> None:
        self.path = path
        self._value = value
        self.restored: Any = value
        is_key = _is_key(value)
        array: Any = jax.eval_shape(jax.random.key_data, value) if is_key else value
        if isinstance(value, _NUMBERS):
            array = np.asarray(value)
        self.shape = tuple(array.shape)
        self.dtype = str(np.dtype(array.dtype))

    @property
    def described(self) -> str:
        """Dtype and shape as JAX writes them, such as float32[2, 3] or key<fry>[]."""
        if _is_key(self._value):
            return f"{self._value.dtype}{list(self._value.shape)}"
        return f"{self.dtype}{list(self.shape)}"

    @property
    def sharding(self) -> str:
        """Sharding, for messages."""
        sharding = getattr(self._value, "sharding", None)
        return "on the host" if sharding is None else str(sharding)

    def own_value(self) -> Any:
        """Returns the whole array; a ShapeDtypeStruct raises. Call on every process."""
        if isinstance(self._value, jax.ShapeDtypeStruct):
            raise invalid(
                f"{self.path} is {self._value}, which has no value to save.",
                expected="an array; a ShapeDtypeStruct only describes an array to restore.",
                fix="restore first, or pass a pytree of arrays.",
            )
        if isinstance(self._value, _NUMBERS):
            return np.asarray(self._value)
        value: Any = self._value
        if _is_key(self._value) and isinstance(self._value, jax.Array):
            value = jax.random.key_data(self._value)
        is_in_parts = is_multi_process(value) and not value.is_fully_replicated
        return compute_on_every_process(value) if is_in_parts else value

    def assign(self, value: ArrayLike) -> None:
        """Sets the replacement from a saved host array: same sharding, or same type of number."""
        old, host = self._value, np.asarray(value)
        if isinstance(old, _NUMBERS):
            self.restored = type(old)(host.item())
        elif _is_key(old):
            keys = jax.random.wrap_key_data(jnp.asarray(host), impl=_key_kind(old))
            self.restored = keys if _is_uncommitted(old) else jax.device_put(keys, old.sharding)
        elif isinstance(old, jax.Array | jax.ShapeDtypeStruct):
            self.restored = _device_array_like(host, old)
        else:
            self.restored = type(old)(host) if isinstance(old, np.generic) else np.array(host)


class Tree:
    """A pytree with its leaves by path; TypeError unless all are arrays, keys or numbers."""

    def __init__(self, name: str, tree: object) -> None:
        paths, self._treedef = jax.tree_util.tree_flatten_with_path(tree)
        self.leaves: dict[str, ArrayLeaf] = {}
        seen: Counter[str] = Counter()
        for keys, value in paths:
            if not _is_leaf(value):
                raise TypeError(
                    explain(
                        f"{name}{jax.tree_util.keystr(keys)}={value!r} cannot be saved.",
                        expected="a pytree of arrays, keys and numbers, or a dict from names to "
                        f"Keras variables; got {type(value).__name__}.",
                        fix="pass each Keras object to the Checkpoint as a separate argument, "
                        "and register dataclasses with jax.tree_util.register_dataclass.",
                    )
                )
            path = "/".join(_text(key) for key in keys) or _ONLY_LEAF
            seen[path] += 1
            if seen[path] > 1:
                path = f"{path}#{seen[path]}"
            self.leaves[path] = ArrayLeaf(f"{name}{jax.tree_util.keystr(keys)}", value)

    def restored(self) -> Any:
        """Returns a pytree of the same structure with the restored leaves."""
        return jax.tree.unflatten(self._treedef, [leaf.restored for leaf in self.leaves.values()])


def is_tree(value: object) -> bool:
    """True for an array or a container that JAX flattens."""
    is_container = not jax.tree_util.all_leaves([value]) and value is not None
    return is_container or (_is_leaf(value) and not isinstance(value, _NUMBERS))


def _is_leaf(value: object) -> bool:
    if isinstance(value, _NUMBERS):
        return np.asarray(value).dtype != object  # more than 64 bits
    if not isinstance(value, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct):
        return False
    return _is_key(value) or np.dtype(value.dtype).kind not in "OUSMm"


def _is_key(value: object) -> TypeGuard[jax.Array | jax.ShapeDtypeStruct]:
    dtype = getattr(value, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def _text(key: object) -> str:
    return jax.tree_util.keystr((key,), simple=True).replace("/", "%2F")


def _key_kind(value: jax.Array | jax.ShapeDtypeStruct) -> Any:
    """Returns the generator of a key, or for a ShapeDtypeStruct the generator with its dtype."""
    if isinstance(value, jax.Array):
        return jax.random.key_impl(value)
    return next(kind for kind in _GENERATORS if jax.random.key(0, impl=kind).dtype == value.dtype)


def _is_uncommitted(value: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return value.sharding is None or (isinstance(value, jax.Array) and not value.committed)


def _device_array_like(
    host: np.ndarray[Any, Any], like: jax.Array | jax.ShapeDtypeStruct
) -> jax.Array:
    """Returns a device array with the sharding of `like`, or uncommitted if `like` is."""
    if _is_uncommitted(like):
        return jnp.asarray(host)
    return jax.make_array_from_callback(host.shape, like.sharding, lambda index: host[index])


# The kind of a dict of variables, matched by name only.
NAMED_VARIABLES = "variables"
PYTREE = "pytree"


@runtime_checkable
class Stateful(Protocol):
    """An object whose state is JSON, such as an iterator over data."""

    def get_state(self) -> Any:
        """Returns the state."""
        ...

    def set_state(self, state: Any) -> None:
        """Restores a state that `get_state` returned, possibly in another process."""
        ...


@dataclasses.dataclass(frozen=True)
class Part:
    """One object of a checkpoint: its variables by path, in creation order, and its JSON state.

    `source` is None without JSON state. `tree` is the pytree with the variables as leaves, or None
    for objects that change in place. `kind` describes the object in messages.
    """

    name: str
    kind: str
    variables: dict[str, Any]
    source: Stateful | None = None
    tree: Tree | None = None

    @property
    def remote_tables(self) -> dict[str, tuple[Any, str]]:
        """Tables whose rows stay on servers, by path: those of the servers, and the name there."""
        tables = {path: getattr(one, "remote_table", None) for path, one in self.variables.items()}
        return {path: table for path, table in tables.items() if table is not None}


def part_of(name: str, value: object) -> Part:
    """Returns the variables and the state of an object.

    Raises TypeError for an unsupported object, ValueError if it has no variables yet.
    """
    if isinstance(value, keras.Variable | ShardedVariable):
        return Part(name, "variable", {"value": value})
    if isinstance(value, dict) and _holds_variables(value):
        return Part(name, NAMED_VARIABLES, dict(value))
    if isinstance(value, keras.Model):
        return _of_model(name, value)
    for kind, class_ in _KINDS.items():
        if isinstance(value, class_):
            if not getattr(value, "built", True):
                raise _not_built(name, kind, value)
            return part_by_path(name, kind, {"": _variables(value)})
    if isinstance(value, Stateful):
        return Part(name, "state", {}, value)
    if is_tree(value):
        tree = Tree(name, value)
        return Part(name, PYTREE, dict(tree.leaves), tree=tree)
    raise TypeError(
        explain(
            f"{name}={value!r} cannot be saved.",
            expected="a Keras model, layer, optimizer, metric, seed generator or variable, a dict "
            "of variables, a pytree of arrays, or an object with get_state() and set_state(), such "
            f"as an iterator of a distributed dataset; got {type(value).__name__}.",
            fix="store numbers in a keras.Variable: step = sg.Variable(0, dtype='int32').",
        )
    )


def state_of(part: Part) -> Any:
    """Returns the JSON state of an object; raises TypeError if JSON cannot hold it."""
    assert part.source is not None
    state = part.source.get_state()
    try:
        json.dumps(state)
    except TypeError as error:
        raise TypeError(
            explain(
                f"{part.name}.get_state() returned a value that JSON cannot store: {error}",
                expected="numbers, strings, booleans, None, and lists and dicts of them.",
                fix="wrap the object in one whose get_state() and set_state() convert the state.",
            )
        ) from error
    return state


def part_by_path(name: str, kind: str, groups: Mapping[str, Iterable[Any]]) -> Part:
    """Returns an object's part from variables by group; the group "" adds no prefix to the path."""
    variables = {
        f"{group}/{path}" if group else path: variable
        for group, members in groups.items()
        for path, variable in _by_path(members)
    }
    return Part(name, kind, variables)


def model_groups(model: keras.Model) -> dict[str, list[Any]]:
    """Returns a model's variables in the layout of `keras.Model.get_state_tree`."""
    optimizer = getattr(model, "optimizer", None)
    return {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": [] if optimizer is None else optimizer.variables,
        "metrics_variables": model.metrics_variables,
    }


def _holds_variables(value: dict[Any, Any]) -> bool:
    """True for a dict of variables by name, or an empty one."""
    kinds = keras.Variable | ShardedVariable
    return all(isinstance(key, str) and isinstance(one, kinds) for key, one in value.items())


def _of_model(name: str, model: keras.Model) -> Part:
    if not model.built:
        raise _not_built(name, "model", model)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        build_optimizer(optimizer, model)
    return part_by_path(name, "model", model_groups(model))


def build_optimizer(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    """Builds the optimizer's variables under the strategy of the model's variables."""
    homes = [home_of(variable) for variable in model.variables]
    strategy = next((home.strategy for home in homes if home is not None), None)
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        optimizer.build(model.trainable_variables)


def _by_path(variables: Iterable[keras.Variable]) -> Iterable[tuple[str, keras.Variable]]:
    """Yields each variable with its path; duplicates of a path get a number."""
    seen: Counter[str] = Counter()
    for variable in variables:
        seen[variable.path] += 1
        number = seen[variable.path]
        yield variable.path if number == 1 else f"{variable.path}#{number}", variable


def _variables(value: _Holder) -> list[keras.Variable]:
    if isinstance(value, keras.random.SeedGenerator):
        return [value.state]
    return list(value.variables)


_Holder = (
    keras.Layer | keras.optimizers.Optimizer | keras.metrics.Metric | keras.random.SeedGenerator
)
_KINDS: dict[str, type[_Holder]] = {
    "layer": keras.Layer,
    "optimizer": keras.optimizers.Optimizer,
    "metric": keras.metrics.Metric,
    "seed generator": keras.random.SeedGenerator,
}


def _not_built(name: str, kind: str, value: object) -> ValueError:
    is_optimizer = kind == "optimizer"
    return invalid(
        f"The {kind} {name}={value!r} has no variables yet.",
        expected="an object with variables, whose values can be saved or restored.",
        fix="call optimizer.build(model.trainable_variables) first."
        if is_optimizer
        else "build it, or call it with a batch, first.",
        code="SG705",
    )


# Status of a restore: the values that objects have received and those still pending.


_MAX_NAMES = 10
_logger = logging.getLogger(__name__)


class Consumption:
    """Tracks restored values of a checkpoint; on deletion, warns about values nothing received.

    `optional` values need no object, such as the state of metrics. `has_matched` is True once the
    checkpoint has an object, whose variables may still be missing.
    """

    def __init__(self, where: str, values: Iterable[str], optional: Iterable[str]) -> None:
        self.where = where
        self._is_partial = False
        self._left = dict.fromkeys(values)
        self._optional = set(optional)
        self.has_matched = False
        self.unmatched: dict[str, None] = {}

    def consume(self, values: Iterable[str]) -> None:
        """Records values that an object has received."""
        for value in values:
            self._left.pop(value, None)
            self.has_matched = True

    @property
    def left(self) -> list[str]:
        """Names of the required values that no object has received."""
        return [value for value in self._left if value not in self._optional]

    @property
    def left_names(self) -> str:
        """The first of these values, for messages."""
        return first_names(self.left)

    @property
    def unmatched_names(self) -> str:
        """The first objects without values, for messages."""
        return first_names(list(self.unmatched))

    def expect_partial(self) -> None:
        """Disables the warning at deletion."""
        self._is_partial = True

    def __del__(self) -> None:
        if self._is_partial or not (self.left or self.unmatched):
            return
        _logger.warning(
            "%s was only partly restored.\nValues without an object: %s.\n"
            "Objects without values: %s.\n"
            "If this is intended, call .expect_partial() on the result of restore().",
            self.where,
            self.left_names,
            self.unmatched_names,
        )


class LoadStatus:
    """Status of a restore, returned by `Checkpoint.restore` and `Checkpoint.read`.

    Objects with variables already have their values. Other objects get them when their variables
    are created.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        ...     path = sg.train.Checkpoint(model=saved).save(folder + "/ckpt")
        ...     model = keras.Sequential([keras.layers.Dense(2)])
        ...     status = sg.train.Checkpoint(model=model).restore(path)
        ...     model.build((None, 3))
        >>> _ = status.assert_consumed()
        >>> bool((model.layers[0].kernel.value == saved.layers[0].kernel.value).all())
        True

    Source: TF 2.21 checkpoint.py, CheckpointLoadStatus.
    """

    def __init__(self, consumption: Consumption) -> None:
        self._consumption = consumption

    def assert_consumed(self) -> LoadStatus:
        """Checks that every value was restored and every object has its values.

        Metrics of a model are exempt: they are reset at each epoch.

        Returns:
            This status.

        Raises:
            AssertionError: values or objects are left over.
        """
        consumption = self._consumption
        if consumption.left or consumption.unmatched:
            raise AssertionError(
                explain(
                    f"{consumption.where} is only partly restored. Values without an object: "
                    f"{consumption.left_names}. Objects without values: "
                    f"{consumption.unmatched_names}.",
                    expected="an object for each saved value, and saved values for each object.",
                    fix="build the objects first, pass the missing ones to the Checkpoint, or "
                    "call assert_existing_objects_matched() or expect_partial() instead.",
                    code="SG704",
                )
            )
        return self

    def assert_existing_objects_matched(self) -> LoadStatus:
        """Checks that the checkpoint holds all objects with variables.

        Returns:
            This status.

        Raises:
            AssertionError: it does not.
        """
        consumption = self._consumption
        if consumption.unmatched:
            raise AssertionError(
                explain(
                    f"{consumption.where} holds no values for {consumption.unmatched_names}.",
                    expected="a checkpoint of all objects whose variables exist.",
                    fix="remove the new objects from the Checkpoint, or call expect_partial().",
                    code="SG704",
                )
            )
        return self

    def assert_nontrivial_match(self) -> LoadStatus:
        """Checks that the checkpoint holds at least one of the objects.

        Returns:
            This status.

        Raises:
            AssertionError: it holds none.
        """
        consumption = self._consumption
        if not consumption.has_matched:
            raise AssertionError(
                explain(
                    f"No object matches {consumption.where}, which holds {consumption.left_names}.",
                    expected="at least one object under the name it was saved with.",
                    fix="pass the objects to the Checkpoint under the names they were saved with.",
                    code="SG704",
                )
            )
        return self

    def expect_partial(self) -> LoadStatus:
        """Disables the warning about values that were not restored.

        Returns:
            This status.
        """
        self._consumption.expect_partial()
        return self

    def __repr__(self) -> str:
        consumption = self._consumption
        return f"LoadStatus({consumption.where!r}, waiting={len(consumption.left)})"


def first_names(names: Sequence[str]) -> str:
    """Returns the first of some names, for messages."""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return (", ".join(names[:_MAX_NAMES]) or "none") + more
