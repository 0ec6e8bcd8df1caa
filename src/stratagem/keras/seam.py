"""Installation of every replacement in Keras, on import."""

from stratagem import environment

# Both first: on another backend the rest would fail with misleading errors.
environment.require_jax_choice()

import keras  # noqa: E402

environment.require_jax_backend(keras.config.backend())

from stratagem import strategies  # noqa: E402 - the default strategy fills its slot on import
from stratagem.checkpoint.creation_hooks import set_keras  # noqa: E402
from stratagem.keras import (  # noqa: E402
    batch_normalization,
    embedding,
    explicit_placement,
    losses,
    made_in_scope,
    metric_logs,
    metrics,
    model,
    optimizer,
    pooling,
    random,
    running_fit,
    served_optimizer,
    served_shipping,
    stateful_rnn,
    variable_creation,
)
from stratagem.keras.private import (  # noqa: E402
    flatten_layers,
    get_stateless_scope,
    in_symbolic_scope,
)
from stratagem.strategies.logical_devices import set_shape_inference  # noqa: E402
from stratagem.summary import collector  # noqa: E402

__all__ = ["install"]


def install() -> None:
    """Installs every replacement."""
    assert strategies.DefaultStrategy
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
        served_optimizer,
        served_shipping,
        model,
        running_fit,
        made_in_scope,
    ):
        part.install()
