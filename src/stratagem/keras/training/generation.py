"""Generation of KerasHub's models from weights that stay on the devices that store them.

A model's `make_generate_function` returns a function that reads all variables and passes them to a
compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import jax
import keras

from stratagem.contexts import current_function_trace, has_strategy
from stratagem.execution.context.replica import get_replica_context
from stratagem.keras.variables.made_in_scope import adopt_new
from stratagem.keras.variables.stored_reads import reading_as_stored
from stratagem.variables.registry import home_of
from stratagem.variables.store import is_remote, store_of

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from stratagem.devices.mesh import Topology
    from stratagem.strategies.base.strategy import Strategy


def generating_with_shards(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's `make_generate_function`."""

    @functools.wraps(original)
    def make(self: keras.Model, *args: object, **kwargs: object) -> Any:
        generate = original(self, *args, **kwargs)
        variables = [*self.trainable_variables, *self.non_trainable_variables]
        strategy = _strategy_of(self, variables)
        if strategy is None:
            return generate
        # Otherwise its new seeds would be on other devices than before, and compile once more.
        adopt_new(getattr(getattr(self, "sampler", None), "variables", ()), strategy)
        return _Generation(generate, strategy, is_in_parts=any(map(_is_in_parts, variables)))

    return make


def place_prompts(generate: object, prompts: Any) -> tuple[Strategy | None, Any]:
    """Returns prompts on the devices that a generate function uses.

    The strategy is that whose variables are then read as they are stored; None to read them whole.
    """
    return generate.place(prompts) if isinstance(generate, _Generation) else (None, prompts)


class _Generation:
    """A generate function that computes on the devices of all replicas."""

    def __init__(self, generate: Any, strategy: Strategy, *, is_in_parts: bool) -> None:
        # A subclass may make its function from that of its base class.
        self._generate = generate._generate if isinstance(generate, _Generation) else generate
        self._strategy = strategy
        self._is_in_parts = is_in_parts

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Generates; the results are on the first replica's device."""
        strategy, (args, kwargs) = self.place((args, kwargs))
        if strategy is None:
            return self._generate(*args, **kwargs)
        with reading_as_stored(strategy):
            outputs = self._generate(*args, **kwargs)
        devices = strategy.topology.devices
        assert devices is not None
        return jax.device_put(outputs, devices[0])

    def place(self, inputs: Any) -> tuple[Strategy | None, Any]:
        """Returns inputs on the strategy's devices; None if all replicas would compute the same."""
        topology = self._strategy.topology
        leaves, structure = jax.tree.flatten(inputs)
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        is_split = topology.num_replicas > 1 and _divides_rows(arrays, topology.num_replicas)
        if not is_split and not self._is_in_parts:
            return None, inputs
        rows = topology.stacked if is_split else topology.replicated
        placed = [_placed(leaf, rows, topology) if _is_array(leaf) else leaf for leaf in leaves]
        return self._strategy, jax.tree.unflatten(structure, placed)


def _strategy_of(model: keras.Model, variables: Iterable[keras.Variable]) -> Any:
    """Returns the strategy of variables that are on the devices of all its replicas, else None.

    None also with one device, with several processes, in a replica function, and for a model that
    runs eagerly.
    """
    homes = [home_of(variable) for variable in variables]
    strategy = homes[0].strategy if homes and homes[0] is not None else None
    if strategy is None or any(home is None or home.strategy is not strategy for home in homes):
        return None
    topology = strategy.topology
    is_outside = not has_strategy() or get_replica_context() is None
    is_compiled = strategy.executor.has_values and not model.run_eagerly
    has_devices = len(topology.all_devices or ()) > 1 and not topology.spans_processes
    is_usable = is_outside and is_compiled and has_devices and current_function_trace() is None
    return strategy if is_usable and all(map(_is_on_replicas, variables)) else None


def _is_on_replicas(variable: keras.Variable) -> bool:
    store = store_of(variable)
    return not is_remote(variable) and (store is None or store.is_on_replicas)


def _is_in_parts(variable: keras.Variable) -> bool:
    return store_of(variable) is not None or getattr(variable, "division", None) is not None


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _divides_rows(arrays: list[Any], count: int) -> bool:
    """Returns True if all arrays have the same number of rows, which is a multiple of a count."""
    numbers = {array.shape[0] for array in arrays if array.ndim}
    return len(numbers) == 1 and numbers.pop() % count == 0


def _placed(array: Any, rows: NamedSharding, topology: Topology) -> jax.Array:
    sharding = rows if array.ndim else topology.replicated
    return jax.device_put(keras.ops.convert_to_tensor(array), sharding)
