"""Installation of every replacement in Keras, on import."""
# ruff: noqa: E402

from stratagem import environment

# Both first: on another backend the rest would fail with misleading errors.
environment.require_jax_choice()

import keras

environment.require_jax_backend(keras.config.backend())

from stratagem.checkpoint.creation_hooks import set_keras
from stratagem.keras.numerics import (
    batch_normalization,
    embedding,
    losses,
    metrics,
    optimizer,
    pooling,
    random,
    stateful_rnn,
)
from stratagem.keras.private import (
    flatten_layers,
    get_stateless_scope,
    in_symbolic_scope,
)
from stratagem.keras.training import active_fit, metric_logs, model
from stratagem.keras.variables import (
    explicit_placement,
    made_in_scope,
    optimizer_slots,
    variable_creation,
)
from stratagem.strategies.base.default import DefaultStrategy  # fills its slot
from stratagem.strategies.base.logical_devices import set_shape_inference
from stratagem.summary import collector

__all__ = ["install"]


def install() -> None:
    """Installs every replacement."""
    assert DefaultStrategy
    set_shape_inference(in_symbolic_scope)
    collector.set_shape_inference(in_symbolic_scope)
    set_keras(flatten_layers, get_stateless_scope, in_symbolic_scope)
    layers = (batch_normalization, embedding, pooling, stateful_rnn)
    for part in (
        variable_creation,
        explicit_placement,
        random,
        metrics,
        metric_logs,
        losses,
        *layers,
        optimizer,
        optimizer_slots,
        model,
        active_fit,
        made_in_scope,
    ):
        part.install()
