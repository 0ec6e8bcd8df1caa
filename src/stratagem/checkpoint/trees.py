"""Pytrees of arrays in checkpoints: leaves by path, and rebuilding the restored tree."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.lockstep import compute_on_every_process, is_multi_process
from stratagem.messages import explain

if TYPE_CHECKING:
    from jax.typing import ArrayLike


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
            raise ValueError(
                explain(
                    f"{self.path} is {self._value}, which has no value to save.",
                    expected="an array; a ShapeDtypeStruct only describes an array to restore.",
                    fix="restore first, or pass a pytree of arrays.",
                )
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
