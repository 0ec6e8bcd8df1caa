"""Installation of every patch of Keras, on import."""

# ruff: noqa: E402

import itertools

from stratagem import environment

# Both first: on another backend the rest would fail with misleading errors.
environment.require_jax_choice()

import keras

environment.require_jax_backend(keras.config.backend())

from stratagem.checkpoint.creation_hooks import set_keras
from stratagem.execution.summary import collector
from stratagem.keras.callbacks.joining_fit import JoiningFit
from stratagem.keras.numerics.random_state import RandomState
from stratagem.keras.patches import PATCHES
from stratagem.keras.private import get_stateless_scope, in_symbolic_scope
from stratagem.keras.private.variables import flatten_layers
from stratagem.messages import explain
from stratagem.strategies.base.default import DefaultStrategy  # fills its slot
from stratagem.strategies.base.logical_devices import set_shape_inference
from stratagem.strategies.elastic_admission import ElasticAdmission


def install() -> None:
    """Fills the slots of lower rooms and installs `PATCHES`."""
    assert DefaultStrategy
    set_shape_inference(in_symbolic_scope)
    collector.set_shape_inference(in_symbolic_scope)
    ElasticAdmission.callback, ElasticAdmission.random_state = JoiningFit, RandomState
    set_keras(flatten_layers, get_stateless_scope, in_symbolic_scope)
    patches = list(itertools.chain(*PATCHES.values()))
    if lost := [patch.full_name for patch in patches if patch.is_lost]:
        raise ImportError(
            explain(
                f"Keras {keras.__version__} has no {', '.join(lost)}, which Stratagem replaces.",
                expected="Keras 3.12 to 3.16.",
                fix="install one of these, or a newer Stratagem.",
            )
        )
    for patch in patches:
        patch.install()
