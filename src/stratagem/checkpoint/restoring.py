"""Restores for objects with variables that are created after the restore."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.checkpoint.objects import (
    NAMED_VARIABLES,
    PYTREE,
    ArrayLeaf,
    Part,
    build_optimizer,
    first_names,
    model_groups,
    part_by_path,
)
from stratagem.checkpoint.storage.shard_reader import Receiver
from stratagem.devices.lockstep import compute_on_every_process, is_multi_process, wait_until_ready
from stratagem.devices.shards import assemble_on_host, local_shards, put_local_shards
from stratagem.errors import invalid
from stratagem.execution.tracing.functionalize import is_uninitialized
from stratagem.variables.components import store_components
from stratagem.variables.distributed import PerReplica
from stratagem.variables.layouts import is_in_parts, is_keyed, store_of
from stratagem.variables.registry import VariableKind, home_of

# Hooks that run an action when Keras creates or initializes variables.


class _KerasHooks:
    """Functions that use Keras's private names, set by the `keras` package."""

    def __init__(self) -> None:
        self.flatten_layers: Callable[[Any], list[Any]] = lambda layer: [layer]
        self.stateless_scope: Callable[[], Any] = lambda: None
        self.infers_shapes: Callable[[], bool] = lambda: False


_hooks = _KerasHooks()


def set_keras(
    flatten_layers: Callable[[Any], list[Any]],
    stateless_scope: Callable[[], Any],
    infers_shapes: Callable[[], bool],
) -> None:
    """Sets functions that list sublayers, return the stateless scope, detect shape inference."""
    _hooks.flatten_layers, _hooks.stateless_scope = flatten_layers, stateless_scope
    _hooks.infers_shapes = infers_shapes


def infers_shapes() -> bool:
    """True while Keras calls a model to build its layers; Keras ignores errors then."""
    return _hooks.infers_shapes()


def layers_of(layer: keras.layers.Layer) -> list[Any]:
    """Returns a layer and every layer inside it."""
    return _hooks.flatten_layers(layer)


def is_in_step() -> bool:
    """True while code is traced or called for shapes, when an assignment would be traced."""
    return _hooks.stateless_scope() is not None or isinstance(jnp.zeros(()), Tracer)


def call_after(owner: Any, method: str, action: Callable[[], bool]) -> None:
    """Runs an action after each call of one object's method, until the action returns True."""
    # Not by assignment: a built layer forbids it.
    vars(owner)[method] = _MethodWithCallback(owner, method, action)


class _MethodWithCallback:
    """A bound method followed by an action; copies of the object get only the method."""

    def __init__(self, owner: Any, method: str, action: Callable[[], bool]) -> None:
        functools.update_wrapper(self, getattr(owner, method))
        self._members, self._method, self._action = vars(owner), method, action
        self._original: Any = getattr(owner, method)
        self._had_own = method in self._members
        self._is_done = False

    def __call__(self, *args: object, **kwargs: object) -> Any:
        result = self._original(*args, **kwargs)
        if not self._is_done and self._action():
            self._remove()
        return result

    def __reduce__(self) -> Any:
        return _identity, (self._original,)

    def _remove(self) -> None:
        self._is_done, self._action = True, bool
        if self._members.get(self._method) is not self:
            return  # replaced by another hook
        self._members.pop(self._method)
        if self._had_own:
            self._members[self._method] = self._original


def _identity(method: object) -> Any:
    return method


def when_initialized(variables: Iterable[Any], action: Callable[[], None]) -> None:
    """Runs an action once all variables have their first value; immediately if they do."""
    waiting = {id(one): one for one in variables if is_uninitialized(one)}
    if not waiting:
        action()
        return
    for variable in list(waiting.values()):
        _after_first_value(variable, functools.partial(_finish_one, waiting, variable, action))


def _finish_one(
    waiting: dict[int, Any], variable: keras.Variable, action: Callable[[], None]
) -> None:
    waiting.pop(id(variable), None)
    if not waiting:
        action()


def _after_first_value(variable: keras.Variable, then: Callable[[], None]) -> None:
    def is_initialized() -> bool:
        if is_uninitialized(variable):
            return False
        then()
        return True

    call_after(variable, "_deferred_initialize", is_initialized)


# Matching of an object's variables to the arrays of a checkpoint.

OPTIMIZER, METRICS = "optimizer_variables", "metrics_variables"


def match(part: Part, entries: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    """Returns the path of the saved array for each variable path of an object.

    Matches by path or, if automatic layer names differ, in creation order. Dicts of variables
    match by name only and may use a subset of the saved arrays. Raises ValueError if variables,
    shapes, or dtypes of a pytree's leaves differ. `entries` are in saved order.
    """
    if part.kind == PYTREE:
        return _match_leaves(part, entries, where)
    found: dict[str, str] = {}
    saved = _grouped(part, [entry["path"] for entry in entries])
    own = _grouped(part, part.variables)
    shapes = {entry["path"]: tuple(entry["shape"]) for entry in entries}
    if part.kind == NAMED_VARIABLES:
        missing = [path for path in part.variables if path not in shapes]
        if missing:
            raise _variables_error(part, list(part.variables), list(shapes), where)
        saved[""] = list(part.variables)  # other saved arrays are ignored
    for group, paths in own.items():
        there = saved.get(group, [])
        if group == OPTIMIZER and not there:
            continue  # the model was saved before it was compiled
        if group == METRICS and len(there) != len(paths):
            continue  # metrics are created with the first batch and reset at each epoch
        if set(there) != set(paths) and len(there) != len(paths):
            raise _variables_error(part, paths, there, where)
        pairs = zip(paths, paths if set(there) == set(paths) else there, strict=True)
        for path, saved_path in pairs:
            shape = tuple(part.variables[path].shape)
            if shape != shapes[saved_path]:
                raise _shape_error(part, path, shape, saved_path, shapes[saved_path], where)
            found[path] = saved_path
    return found


def _match_leaves(part: Part, entries: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    saved = {entry["path"]: entry for entry in entries}
    if saved.keys() != part.variables.keys():
        raise _variables_error(part, list(part.variables), list(saved), where)
    for path, leaf in part.variables.items():
        entry = saved[path]
        there = f"{entry['dtype']}{list(entry['shape'])}"
        if "described" in entry:
            is_same, there = entry["described"] == leaf.described, entry["described"]
        else:  # saved as another kind of object, or a backup in memory
            is_same = there == f"{leaf.dtype}{list(leaf.shape)}"
        if not is_same:
            raise invalid(
                f"{leaf.path} is {leaf.described} here, {leaf.sharding}, but {there} in "
                f"{where}, {entry.get('sharding', 'on the host')}.",
                expected="a pytree with the shapes and dtypes that were saved.",
                fix="create the arrays with the saved shapes and dtypes, or restore into a "
                "pytree like the saved one and convert it.",
                code="SG703",
            )
    return {path: path for path in saved}


def _grouped(part: Part, paths: Iterable[str]) -> dict[str, list[str]]:
    """Groups paths by their first component for models; all paths form one group otherwise."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(path.split("/")[0] if part.kind == "model" else "", []).append(path)
    return groups


def _variables_error(
    part: Part, own: Sequence[str], saved: Sequence[str], where: str
) -> ValueError:
    missing = [path for path in own if path not in set(saved)]
    extra = [path for path in saved if path not in set(own)]
    return invalid(
        f"{where} holds {len(saved)} variables of {part.name}, which has {len(own)}. "
        f"Not in the checkpoint: {first_names(missing)}. "
        f"Only there: {first_names(extra)}.",
        expected="an object with the variables that were saved.",
        fix="build the object as it was when saved, or restore another checkpoint.",
        code="SG703",
    )


def _shape_error(
    part: Part,
    path: str,
    shape: tuple[int, ...],
    saved_path: str,
    saved_shape: tuple[int, ...],
    where: str,
) -> ValueError:
    saved_as = "" if path == saved_path else f", saved as {saved_path},"
    return invalid(
        f"{part.name}/{path}{saved_as} has shape {shape} here but {saved_shape} in {where}.",
        expected="the shape that was saved.",
        fix="build the object as it was when saved, or restore another checkpoint.",
        code="SG703",
    )


_WEIGHTS = "weights"

Assign = Callable[[Part, Mapping[str, str]], None]
_Plan = list[tuple[Part, dict[str, str]]]


def may_create_variables(value: object, entries: Sequence[Mapping[str, Any]]) -> bool:
    """True if an object may still create variables that `entries`, its saved arrays, hold."""
    if isinstance(value, keras.Layer):
        saved = {str(entry["path"]).split("/")[0] for entry in entries}
        has_optimizer = getattr(value, "optimizer", None) is not None
        is_uncompiled = isinstance(value, keras.Model) and not has_optimizer
        return not _is_built(value) or (is_uncompiled and OPTIMIZER in saved)
    if isinstance(value, keras.optimizers.Optimizer):
        return not value.built
    return isinstance(value, keras.metrics.Metric) and len(value.variables) < len(entries)


class DeferredRestore:
    """Restores an object as its variables are created: first the weights, then the optimizer's.

    `entries` holds path and shape of its saved arrays, and `where` describes the checkpoint in
    messages. `is_over` returns True once another restore has replaced this one.
    """

    def __init__(
        self,
        name: str,
        value: Any,
        entries: Sequence[Mapping[str, Any]],
        where: str,
        assign: Assign,
        is_over: Callable[[], bool],
    ) -> None:
        self.name, self._value, self._entries, self._where = name, value, entries, where
        self._assign, self._is_over = assign, is_over
        self._hooked: set[tuple[int, str]] = set()
        self._left = {_WEIGHTS}
        if isinstance(value, keras.Model) and self._count(OPTIMIZER):
            self._left.add(OPTIMIZER)

    @property
    def is_done(self) -> bool:
        """True if no variable is missing."""
        return not self._left

    def plan(self) -> _Plan:
        """Returns the variables that can be restored now; raises ValueError on a mismatch."""
        planned: _Plan = []
        for group in sorted(self._left, reverse=True):
            part = self._weights() if group == _WEIGHTS else self._optimizer_part()
            if part is not None:
                planned.append((part, match(part, self._entries, self._where)))
                self._left.discard(group)
        return planned

    def apply(self, planned: _Plan) -> None:
        """Restores the planned variables, and hooks the creation of those still missing."""
        variables = [one for part, _ in planned for one in part.variables.values()]

        def assign() -> None:
            for part, found in planned:
                self._assign(part, found)

        if planned and is_in_step() and not any(map(is_uninitialized, variables)):
            # The variables exist already; the step reads their values when it runs.
            with jax.ensure_compile_time_eval():
                assign()
        elif planned:
            when_initialized(variables, assign)
        self._restore_step_count()
        for owner, method in self._owners():
            if (id(owner), method) not in self._hooked:
                self._hooked.add((id(owner), method))
                call_after(owner, method, functools.partial(self._advance, owner))

    def _advance(self, owner: object) -> bool:
        """Continues after variables were created; returns True when nothing is left."""
        if self._left and not self._is_over():
            try:
                planned = self.plan()
            except ValueError:
                if owner is self._value or not infers_shapes():
                    raise
                return False  # Keras would ignore the error; the whole object is built next
            self.apply(planned)
        return not self._left or self._is_over()

    def _count(self, *groups: str) -> int:
        return sum(
            str(entry["path"]).startswith(f"{group}/")
            for entry in self._entries
            for group in groups
        )

    def _weights(self) -> Part | None:
        """Returns the object's weights, or None if they are incomplete."""
        value = self._value
        if isinstance(value, keras.Model):
            groups = model_groups(value)
            weights = {
                name: list(group)
                for name, group in groups.items()
                if name not in (OPTIMIZER, METRICS)
            }
            is_complete = _is_built(value) or (
                _may_be_built(value)
                and all(len(group) == self._count(name) for name, group in weights.items())
            )
            part = part_by_path(self.name, "model", weights)
            # Surplus variables cannot disappear: report them now.
            return part if is_complete or len(part.variables) > self._count(*weights) else None
        part = part_by_path(self.name, _kind(value), {"": value.variables})
        count = len(part.variables)
        if isinstance(value, keras.Layer):
            is_complete = _is_built(value) or (_may_be_built(value) and count == len(self._entries))
        elif isinstance(value, keras.optimizers.Optimizer):
            is_complete = value.built
        else:
            is_complete = count == len(self._entries)
        return part if is_complete or count > len(self._entries) else None

    def _optimizer_part(self) -> Part | None:
        """Returns a model's optimizer variables, or None if the optimizer cannot be built yet."""
        optimizer = self._optimizer()
        if optimizer is None or _WEIGHTS in self._left:
            return None
        if not optimizer.built:
            if is_in_step() or any(map(is_uninitialized, self._value.variables)):
                return None
            build_optimizer(optimizer, self._value)
        return part_by_path(self.name, "model", {OPTIMIZER: optimizer.variables})

    def _optimizer(self) -> Any:
        if isinstance(self._value, keras.Model):
            return getattr(self._value, "optimizer", None) if OPTIMIZER in self._left else None
        return self._value if isinstance(self._value, keras.optimizers.Optimizer) else None

    def _restore_step_count(self) -> None:
        """Restores an optimizer's step count, which exists before the optimizer is built."""
        optimizer = self._optimizer()
        if optimizer is None or optimizer.built or not self._left or is_in_step():
            return
        group = OPTIMIZER if optimizer is not self._value else ""
        part = part_by_path(self.name, "optimizer", {group: optimizer.variables})
        shapes = {str(entry["path"]): tuple(entry["shape"]) for entry in self._entries}
        found: dict[str, str] = {}
        for path, variable in part.variables.items():
            own, saved_paths = (
                [p for p in paths if p.startswith(group) and _last(p) == _last(path)]
                for paths in (part.variables, shapes)
            )
            saved = (
                path
                if path in shapes
                else saved_paths[own.index(path)]
                if len(own) == len(saved_paths)
                else None
            )
            if saved is not None and tuple(variable.shape) == shapes[saved]:
                found[path] = saved
        if found:
            self._assign(part, found)

    def _owners(self) -> Iterable[tuple[Any, str]]:
        """Yields objects and the methods that create their missing variables."""
        value = self._value
        if not self._left:
            return
        if isinstance(value, keras.metrics.Metric):
            yield value, "add_variable"
        if isinstance(value, keras.Layer) and _WEIGHTS in self._left:
            yield from ((layer, "build") for layer in layers_of(value) if not layer.built)
        if isinstance(value, keras.Model) and OPTIMIZER in self._left:
            yield value, "compile"
        optimizer = self._optimizer()
        if optimizer is not None and not optimizer.built:
            yield optimizer, "build"


def _is_built(layer: keras.layers.Layer) -> bool:
    return all(one.built for one in layers_of(layer))


def _may_be_built(layer: keras.layers.Layer) -> bool:
    """True if a layer is built, except for sublayers that it may not use."""
    inner = layers_of(layer)[1:]
    return layer.built or (bool(inner) and all(one.built for one in inner))


def _kind(value: object) -> str:
    if isinstance(value, keras.Layer):
        return "layer"
    return "optimizer" if isinstance(value, keras.optimizers.Optimizer) else "metric"


def _last(path: str) -> str:
    return path.rpartition("/")[2]


# Variable values on the host: reading them for a checkpoint and assigning restored ones.


_Array = np.ndarray[Any, Any]


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


def gathered_components_of(part: Part, keep: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns ON_READ components of shape (num_replicas, ...), possibly on devices.

    Unlike their aggregate, they continue training bit for bit with the same number of replicas.
    `keep` as in `whole_values_of`.
    """
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
    """Copies an array to the first CPU device, now; to NumPy if JAX would change its dtype.

    `device_put` may use NumPy's memory, which cannot be donated: the next step would allocate all
    of the state again. Copies that are pending would all need memory at once. The default device
    may be a replica's, which has no room for a table that another device holds.
    """
    if jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        return np.array(value)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
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
    if not has_components(variable):
        return on_host(value)
    return np.stack([np.asarray(one) for one in PerReplica(stacked=value).components])
