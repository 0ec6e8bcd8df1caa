"""Variable values on the host: reading them for a checkpoint and assigning restored ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.checkpoint.deferred_restore import is_in_step
from stratagem.checkpoint.objects import ArrayLeaf, Part
from stratagem.checkpoint.storage.large_arrays import Receiver
from stratagem.devices.lockstep import compute_on_every_process, is_multi_process, wait_until_ready
from stratagem.devices.shards import assemble_on_host, local_shards, put_local_shards
from stratagem.variables.components import store_components
from stratagem.variables.distributed import PerReplica
from stratagem.variables.layouts import is_in_parts
from stratagem.variables.registry import VariableKind, home_of
from stratagem.variables.store import is_keyed, store_of

if TYPE_CHECKING:
    import keras


_Array = np.ndarray[Any, Any]


def values_of(part: Part) -> dict[str, _Array]:
    """Returns the logical value of each variable by path. Call on every process.

    The arrays may alias the variables' memory; release them before the next step, which would
    otherwise allocate new memory.
    """
    return {path: on_host(value) for path, value in whole_values_of(part, on_host).items()}


def whole_values_of(
    part: Part, keep: Callable[[Any], Any], skipped: Collection[str] = ()
) -> dict[str, Any]:
    """Returns the logical value of each variable by path, once computed. Call on every process.

    Values may be on a device, where the next step may donate them. A sharded value that several
    processes hold is a new array; `keep` returns what stays of it. Leaves out the paths `skipped`.
    """
    values = {
        # Keep sharded values one by one: gathered together, they may not fit on one device.
        path: keep(_whole(variable)) if is_sharded_over_processes(variable) else _whole(variable)
        for path, variable in part.variables.items()
        if path not in skipped
    }
    wait_until_ready(list(values.values()))
    return values


def components_of(part: Part) -> dict[str, _Array]:
    """Returns ON_READ components of shape (num_replicas, ...). Call on every process.

    Unlike their aggregate, they continue training bit for bit with the same number of replicas.
    """
    gathered = gathered_components_of(part, on_host)
    return {path: on_host(value) for path, value in gathered.items()}


def gathered_components_of(part: Part, keep: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns ON_READ components, possibly on devices; `keep` as in `whole_values_of`."""
    return {
        path: keep(compute_on_every_process(variable.storage))
        # One that is whole on every device is as it is; it may not be a new array.
        if is_multi_process(variable.storage) and not variable.storage.is_fully_replicated
        else variable.storage
        for path, variable in part.variables.items()
        if has_components(variable)
    }


def local_arrays_of(part: Part) -> dict[str, Any]:
    """Returns this process's arrays of each variable, once computed, without communication.

    Per-replica components and sharded values cover all replicas.
    """
    arrays = {path: _local_array(variable) for path, variable in part.variables.items()}
    wait_until_ready(list(arrays.values()))
    return jax.block_until_ready(arrays)


def local_values_of(part: Part, arrays: Mapping[str, Any]) -> dict[str, _Array]:
    """Returns the arrays of `local_arrays_of` on the host, limited to this process's replicas.

    Components and shards have shape (num_local_replicas, ...). May alias the variables' memory.
    """
    return {path: _local_value(part.variables[path], value) for path, value in arrays.items()}


def on_host(value: object) -> _Array:
    """Returns a value on the host; it may alias the memory of a variable."""
    if isinstance(value, jax.Array) and value.is_fully_replicated:
        # Use a separate array object: JAX caches the host view in the object that created it,
        # and memory with a host view cannot be donated to the next step.
        value = value.addressable_shards[0].data
    return assemble_on_host(value)


def has_components(variable: object) -> bool:
    """True if each replica has a component of the variable."""
    home = home_of(variable)
    return home is not None and home.kind is VariableKind.ON_READ


def is_sharded_over_processes(variable: keras.Variable) -> bool:
    """True if several processes hold a part of the variable's value each."""
    home = home_of(variable)
    if home is None or not is_in_parts(variable, home.strategy.topology):
        return False
    return is_multi_process(variable.stored) and not variable.stored.is_fully_replicated


def assign_local_values(part: Part, paths: Mapping[str, str], values: Mapping[str, _Array]) -> None:
    """Sets variables from `local_values_of` of this process; `paths` maps own to saved paths."""
    for path, saved_path in paths.items():
        variable: Any = part.variables[path]
        home = home_of(variable)
        if home is not None and has_components(variable):
            variable.storage = home.strategy.topology.put_stacked(values[saved_path])
        elif is_sharded_over_processes(variable):
            variable.stored = put_local_shards(
                values[saved_path], variable.shape, variable.stored.sharding
            )
        else:
            variable.assign(values[saved_path])


def assign_values(
    part: Part,
    paths: Mapping[str, str],
    values: dict[str, _Array],
    components: Mapping[str, _Array],
) -> None:
    """Sets variables from saved values, or from per-replica components if they fit.

    `paths` maps the path of each variable to the path in the checkpoint. Removes the values that it
    assigns: their memory serves the next ones.
    """
    for path, saved_path in paths.items():
        variable: Any = part.variables[path]
        own = components.get(saved_path)
        home = home_of(variable)
        if has_components(variable) and own is not None and home is not None:
            topology = home.strategy.topology
            if own.shape == (topology.num_replicas, *variable.shape):
                store_components(variable, own.astype(variable.dtype), topology)
                continue
        _set(variable, values.pop(saved_path))


def receiver() -> Receiver | None:
    """Returns what copies values to the device while others are read; None without CPU devices.

    The memory of other devices may not hold all new values beside the old ones.
    """
    return _own_copy if jax.default_backend() == "cpu" else None


def _own_copy(value: _Array) -> Any:
    """Copies an array to the CPU device, now; to the host if JAX would change its dtype.

    `device_put` may use NumPy's memory, which cannot be donated: the next step would allocate all
    of the state again. Copies that are pending would all need memory at once.
    """
    if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        return np.array(value)
    return jax.block_until_ready(jnp.array(value))


def _set(variable: keras.Variable, value: _Array) -> None:
    """Assigns a value immediately, even while a step is traced."""
    if is_keyed(variable):  # its rows are saved by the servers
        return
    if isinstance(variable, ArrayLeaf):
        variable.assign(value)
        return
    if not is_in_step():
        is_on_device = isinstance(value, jax.Array) or jax.default_backend() != "cpu"
        variable.assign(value if is_on_device else _own_copy(value))
        return
    store = getattr(variable, "store_whole", variable._direct_assign)
    with jax.ensure_compile_time_eval():  # else the conversion is part of the trace
        store(variable._convert_to_tensor(value, dtype=variable.dtype))


def _whole(variable: keras.Variable) -> Any:
    """Returns the value in the variable's own dtype, even if Keras autocasts it for layers."""
    if store_of(variable) is not None and not is_multi_process(variable.stored):
        return variable.stored
    is_divided = store_of(variable) is None and getattr(variable, "division", None) is not None
    if is_divided and not is_sharded_over_processes(variable):
        return variable.storage
    own = getattr(variable, "own_value", None)
    return variable.value if own is None else own()


def _local_array(variable: keras.Variable) -> Any:
    if is_sharded_over_processes(variable):
        return variable.stored
    return variable.storage if has_components(variable) else _whole(variable)


def _local_value(variable: keras.Variable, value: object) -> _Array:
    if is_sharded_over_processes(variable):
        assert isinstance(value, jax.Array)
        return local_shards(value)
    return _local_components(value) if has_components(variable) else on_host(value)


def _local_components(storage: object) -> _Array:
    components = PerReplica(stacked=storage).components
    return np.stack([np.asarray(component) for component in components])
