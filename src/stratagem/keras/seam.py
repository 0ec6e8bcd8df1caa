"""Connection of this package to Keras and to the packages below, on import."""

from __future__ import annotations

import keras

from stratagem.checkpoint.restoring import set_keras
from stratagem.errors import explain
from stratagem.execution.summary import collector
from stratagem.keras import patches
from stratagem.keras.callbacks.backup_and_restore import JoiningFit
from stratagem.keras.numerics import (
    layers,
    local_weights,
    losses,
    metrics,
    optimizer,
    random_state,
    rematerialization,
)
from stratagem.keras.private import flatten_layers, get_stateless_scope, in_symbolic_scope
from stratagem.keras.training import (
    active_fit,
    datasets,
    generate_stream,
    model,
    planned_models,
    several_processes,
    step_functions,
)
from stratagem.keras.variables import creation, requests
from stratagem.strategies.elastic import ElasticAdmission
from stratagem.strategies.logical_devices import set_shape_inference
from stratagem.strategies.strategy import DefaultStrategy

# The modules that declare patches, in the order in which these are installed. No attribute is
# declared twice, so that the order changes nothing.
_DECLARING = (
    creation,
    requests,
    random_state,
    metrics,
    losses,
    layers,
    rematerialization,
    local_weights,
    optimizer,
    active_fit,
    step_functions,
    datasets,
    model,
    planned_models,
    several_processes,
    generate_stream,
    patches,
)

PATCHES = tuple(
    patch for module in _DECLARING for patch in patches.declared.get(module.__name__, ())
)


def install() -> None:
    """Fills the slots of lower packages and installs `PATCHES`."""
    assert DefaultStrategy
    set_shape_inference(in_symbolic_scope)
    collector.set_shape_inference(in_symbolic_scope)
    ElasticAdmission.callback, ElasticAdmission.random_state = JoiningFit, random_state.RandomState
    set_keras(flatten_layers, get_stateless_scope, in_symbolic_scope)
    if lost := [patch.full_name for patch in PATCHES if patch.is_lost]:
        raise ImportError(
            explain(
                f"Keras {keras.__version__} has no {', '.join(lost)}, which Stratagem replaces.",
                expected="Keras 3.12 to 3.16.",
                fix="install one of these, or a newer Stratagem.",
            )
        )
    for patch in PATCHES:
        patch.install()
