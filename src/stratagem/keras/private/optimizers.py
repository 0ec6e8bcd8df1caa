"""Private names of Keras's optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.keras.private.access import as_open

if TYPE_CHECKING:
    import keras

    from stratagem.variables.registry import StoredVariable


def trainable_variables(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    return list(as_open(optimizer)._trainable_variables)


def config_and_rate(optimizer: keras.optimizers.Optimizer) -> tuple[dict[str, Any], Any]:
    """Returns an optimizer's config, and its schedule or function of learning rates, or None.

    Without the config of the schedule: only its class may know how to make it, and may not be
    able to.
    """
    rate = as_open(optimizer)._learning_rate
    if not callable(rate) or hasattr(rate, "assign"):
        return dict(optimizer.get_config()), None
    view: Any = object.__new__(type(optimizer))
    view.__dict__.update(vars(optimizer), _learning_rate=0.0)
    return dict(view.get_config()), rate


def clip_gradients(optimizer: keras.optimizers.Optimizer, grads: list[Any]) -> list[Any]:
    """Returns gradients clipped as the optimizer's arguments say."""
    return list(as_open(optimizer)._clip_gradients(grads))


def count_update(optimizer: keras.optimizers.Optimizer) -> None:
    """Updates the optimizer state that belongs to no variable, such as its counter."""
    as_open(optimizer)._backend_update_step([], [], optimizer.learning_rate)
    as_open(optimizer)._iterations.assign_add(1)


def decays(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable | StoredVariable
) -> bool:
    """Returns True if an optimizer's weight decay applies to a variable."""
    own = as_open(optimizer)
    # Keras 3.16 answers `_use_weight_decay` only for the variables of a built optimizer.
    if hasattr(own, "_is_excluded_from_weight_decay"):
        return not own._is_excluded_from_weight_decay(variable)
    return bool(own._use_weight_decay(variable))


def filter_empty_gradients(
    optimizer: keras.optimizers.Optimizer, grads: list[Any], variables: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the gradients that are not None and their variables; warns about the others."""
    present, of_variables = as_open(optimizer)._filter_empty_gradients(grads, variables)
    return list(present), list(of_variables)
