"""Compressed gradients: their sums, and their errors as state of the optimizer."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import keras

from stratagem.contexts import get_strategy
from stratagem.errors import explain
from stratagem.execution.compressed_sums import compressed_sums
from stratagem.execution.replica_context import ReplicaContext
from stratagem.keras.patches import patches
from stratagem.keras.variables.requests import annotated
from stratagem.variables.indexed_slices import is_indexed_slices
from stratagem.variables.registry import home_of
from stratagem.variables.store import is_compressed

if TYPE_CHECKING:
    from stratagem.devices.compression import Compression


_FACTOR_SEED = 20190531

# By optimizer and identity of the variable; None for variables whose gradients are sent whole.
_states: weakref.WeakKeyDictionary[Any, dict[int, dict[str, keras.Variable] | None]]
_states = weakref.WeakKeyDictionary()


def with_state(original: Callable[..., Any]) -> Any:
    """Returns `Optimizer.build` that adds the state of compressed gradients."""

    @functools.wraps(original)
    def build(self: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]) -> Any:
        variables = list(variables)
        result = original(self, variables)
        _add_state(self, variables)
        return result

    return build


@patches(
    keras.optimizers.Optimizer,
    "load_own_variables",
    why="a file without the errors of compressed gradients leaves them at zero",
)
def loading_without_state(original: Callable[..., Any]) -> Any:
    """Returns `Optimizer.load_own_variables` that also reads files of uncompressed training."""

    @functools.wraps(original)
    def load(self: keras.optimizers.Optimizer, store: Mapping[str, Any]) -> Any:
        states = (state or {} for state in _states.get(self, {}).values())
        own = {id(one) for state in states for one in state.values()}
        others = [one for one in self.variables if id(one) not in own]
        if own and len(store.keys()) == len(others):
            for place, variable in enumerate(others):
                variable.assign(store[f"{place}"])
            return None
        return original(self, store)

    return load


def sums_of_compressed(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    grads: Sequence[Any],
    context: ReplicaContext,
) -> dict[int, Any]:
    """Returns the sums of those gradients that are sent compressed, by their place.

    Call in replica context. Assigns their state.
    """
    compression = context.strategy.cross_device_ops.compression
    if compression is None or context.num_replicas_in_sync == 1:
        return {}
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise _loss_scale_refused(compression)
    if any(id(one) not in _states.get(optimizer, {}) for one in variables):
        _add_state(optimizer, variables)
    known = _states.get(optimizer, {})
    found = {
        place: state
        for place, (variable, grad) in enumerate(zip(variables, grads, strict=True))
        if (state := known.get(id(variable))) is not None
        and grad is not None
        and not is_indexed_slices(grad)
    }
    if not found:
        return {}
    places, states = list(found), list(found.values())
    sums, new_states = compressed_sums(
        compression,
        [grads[place] for place in places],
        [{name: one.value for name, one in state.items()} for state in states],
        context.communicator,
        replica_id=context.replica_id_in_sync_group,
        step=cast("Any", optimizer.iterations).value,
    )
    for state, values in zip(states, new_states, strict=True):
        for name, value in values.items():
            state[name].assign(value)
    return dict(zip(places, sums, strict=True))


def _add_state(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Creates the state of variables that have none yet, in the scope of their strategy."""
    home = home_of(variables[0]) if variables else None
    compression = None if home is None else home.strategy.cross_device_ops.compression
    if home is None or compression is None or home.strategy.num_replicas_in_sync == 1:
        return
    known = _states.setdefault(optimizer, {})

    def create() -> None:
        for variable in variables:
            if id(variable) not in known:
                known[id(variable)] = (
                    state_variables(
                        optimizer, variable, compression.state_shapes(tuple(variable.shape))
                    )
                    if is_compressed(variable, compression)
                    else None
                )

    if get_strategy() is home.strategy:
        create()
    else:
        with home.strategy.scope():
            create()


def state_variables(
    optimizer: Any, variable: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Creates the state of one variable's sums in an optimizer, by name.

    Args:
        optimizer: a Keras optimizer, which saves and restores the state.
        variable: the trained variable.
        shapes: shape of each part of the state; an "error" is each replica's own.
    """
    made: dict[str, Any] = {}
    for name, shape in shapes.items():
        # The errors of a checkpoint are their sum, which other numbers of replicas can share.
        kind = ("on_read", "sum") if name == "error" else ("auto", "none")
        first = keras.initializers.RandomNormal(stddev=1.0, seed=_FACTOR_SEED)
        with annotated(kind=kind):
            made[name] = optimizer.add_variable(
                shape,
                initializer=first if name == "factor" else "zeros",
                dtype="float32",
                name=f"{variable.path.replace('/', '_')}_{name}",
            )
    return made


def _loss_scale_refused(compression: Compression) -> ValueError:
    return ValueError(
        explain(
            f"A LossScaleOptimizer was applied with compression={compression}.",
            expected="gradients of one scale: errors of a step are added to the next one's, and "
            "the loss scale changes between them.",
            fix='train in bfloat16, keras.config.set_dtype_policy("mixed_bfloat16"), which needs '
            "no loss scale, or leave the compression out.",
        )
    )
