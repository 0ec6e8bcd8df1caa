"""The values of variables on the host: taken for a checkpoint, and given back from one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from stratagem.checkpoint.creation import is_in_step
from stratagem.checkpoint.objects import Part
from stratagem.checkpoint.trees import Leaf
from stratagem.topology.lockstep import compute_on_every_process, is_multi_process, wait_until_ready
from stratagem.topology.shards import assemble_on_host
from stratagem.values import PerReplica
from stratagem.variables import VariableKind, home_of, store_of, stored_components

__all__ = [
    "components_of",
    "give",
    "give_own",
    "has_components",
    "lies_in_parts",
    "own_arrays_of",
    "own_values_of",
    "values_of",
]

_Array = np.ndarray[Any, Any]


def values_of(part: Part) -> dict[str, _Array]:
    """Returns what the copies or components of each variable stand for. Call on every process.

    Args:
        part: the object.

    Returns:
        Values by path. They may be the variables' own memory: to be let go of before the next step,
        which takes new memory otherwise.
    """
    values = {
        # What lies in parts may be too large, with others, for the device that it is joined on.
        path: _on_host(_whole(variable)) if lies_in_parts(variable) else _whole(variable)
        for path, variable in part.variables.items()
    }
    wait_until_ready(list(values.values()))
    return {path: _on_host(value) for path, value in values.items()}


def components_of(part: Part) -> dict[str, _Array]:
    """Returns the components of variables that have one on each replica. Call on every process.

    With them training goes on to the last bit where the number of replicas is the same; their
    aggregate says less.

    Args:
        part: the object.

    Returns:
        Arrays of shape (num_replicas, ...) by path.
    """
    return {
        path: _on_host(_all_of(variable.storage))
        for path, variable in part.variables.items()
        if has_components(variable)
    }


def own_arrays_of(part: Part) -> dict[str, Any]:
    """Returns what this process has of each variable, when it is computed; no other is asked.

    Args:
        part: the object.

    Returns:
        By path its value; of what has components, or lies in parts, those of all replicas.
    """
    arrays = {path: _own(variable) for path, variable in part.variables.items()}
    wait_until_ready(list(arrays.values()))
    return jax.block_until_ready(arrays)


def own_values_of(part: Part, arrays: Mapping[str, Any]) -> dict[str, _Array]:
    """Returns what this process has of each variable, on the host.

    Args:
        part: the object.
        arrays: what `own_arrays_of` returned.

    Returns:
        By path its value, or the components or parts of this process's replicas, of shape
        (num_local_replicas, ...). They may be the variables' own memory, as with `values_of`.
    """
    return {path: _own_on_host(part.variables[path], value) for path, value in arrays.items()}


def has_components(variable: Any) -> bool:
    """Tells whether each replica has a component of a variable.

    Args:
        variable: any.
    """
    home = home_of(variable)
    return home is not None and home.kind is VariableKind.ON_READ


def lies_in_parts(variable: Any) -> bool:
    """Tells whether several processes have a part each of the value of a variable.

    Args:
        variable: any.
    """
    if store_of(variable) is None:
        return False
    return is_multi_process(variable.stored) and not variable.stored.is_fully_replicated


def give_own(part: Part, paths: Mapping[str, str], values: Mapping[str, _Array]) -> None:
    """Sets variables to what `own_values_of` returned on this process.

    Args:
        part: the object.
        paths: of what was kept, by that of the variable.
        values: by path of what was kept.
    """
    for path, kept_path in paths.items():
        variable: Any = part.variables[path]
        home = home_of(variable)
        if home is not None and has_components(variable):
            variable.storage = home.strategy.topology.put_stacked(values[kept_path])
        elif lies_in_parts(variable):
            variable.stored = variable.store.from_local_shards(values[kept_path], variable.shape)
        else:
            variable.assign(values[kept_path])


def give(
    part: Part, paths: Mapping[str, str], values: Mapping[str, _Array], components: Any
) -> None:
    """Sets variables to what was saved.

    Args:
        part: the object.
        paths: in the checkpoint, by that of the variable.
        values: by path in the checkpoint.
        components: likewise, for those that had some.
    """
    for path, saved_path in paths.items():
        variable: Any = part.variables[path]
        own = components.get(saved_path)
        home = home_of(variable)
        if has_components(variable) and own is not None and home is not None:
            topology = home.strategy.topology
            if own.shape == (topology.num_replicas, *variable.shape):
                variable.storage = stored_components(own.astype(variable.dtype), topology)
                continue
        _set(variable, values[saved_path])


def _set(variable: Any, value: _Array) -> None:
    """Sets a value now, also while a step is traced that is to find it."""
    if isinstance(variable, Leaf) or not is_in_step():
        variable.assign(value)
        return
    store = getattr(variable, "store_whole", variable._direct_assign)
    store(variable._convert_to_tensor(value, dtype=variable.dtype))


def _whole(variable: Any) -> Any:
    """The value in the variable's own dtype, also where Keras casts what layers read."""
    if getattr(variable, "division", None) is not None:
        return variable.storage
    if store_of(variable) is not None and not is_multi_process(variable.stored):
        return variable.stored
    own = getattr(variable, "own_value", None)
    return variable.value if own is None else own()


def _own(variable: Any) -> Any:
    if lies_in_parts(variable):
        return variable.stored
    return variable.storage if has_components(variable) else _whole(variable)


def _own_on_host(variable: Any, value: Any) -> _Array:
    if lies_in_parts(variable):
        return variable.store.local_shards(value)
    return _own_components(value) if has_components(variable) else _on_host(value)


def _all_of(storage: Any) -> Any:
    return compute_on_every_process(storage) if is_multi_process(storage) else storage


def _own_components(storage: Any) -> _Array:
    components = PerReplica(stacked=storage).components
    return np.stack([np.asarray(component) for component in components])


def _on_host(value: Any) -> _Array:
    if isinstance(value, jax.Array) and value.is_fully_replicated:
        # An object of its own: JAX keeps the host's view with the object that was asked for it,
        # and memory of which there is a view cannot be given away to the next step.
        value = value.addressable_shards[0].data
    return assemble_on_host(value)
