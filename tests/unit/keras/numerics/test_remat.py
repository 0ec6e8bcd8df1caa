"""`sg.remat`: blocks that are found in finished models, and the policies."""

from __future__ import annotations

import functools
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.keras.numerics.decoder_blocks import Block, decoder, equations, fitted


def _scope() -> Any:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all").scope()


@functools.cache
def _reference() -> Any:
    return fitted(_scope())


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["full", "dots", "offload", "offload_dots", jax.checkpoint_policies.everything_saveable],
)
def test_fit_with_a_policy_equals_fit_without(policy: Any) -> None:
    losses, weights = fitted(_scope(), lambda model: sg.remat(model, policy))
    expected_losses, expected = _reference()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for own, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def _tower() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dense(4)(inputs)))


def test_repeated_blocks_are_found_inside_models_and_layers() -> None:
    model = decoder()
    blocks = [one for one in model.layers if isinstance(one, Block)]
    assert sg.remat(model) == blocks
    assert sg.remat(keras.Sequential([model, keras.layers.Dense(1)])) == blocks
    towers = [_tower(), _tower()]
    assert sg.remat(keras.Sequential([keras.Input((4,)), *towers])) == towers


def test_layers_are_chosen_by_pattern_or_as_objects() -> None:
    model = decoder()
    assert [one.name for one in sg.remat(model, layers="block_1$")] == ["block_1"]
    assert sg.remat(model, layers=model.layers[-1:]) == model.layers[-1:]


def test_none_turns_rematerialization_off() -> None:
    model = decoder()

    def num_recomputed() -> int:
        jaxpr = jax.make_jaxpr(lambda x: model(x))(np.ones((2, 4), "float32"))
        return len(equations(jaxpr.jaxpr, "remat2"))

    sg.remat(model)
    assert num_recomputed() == 2
    sg.remat(model, None)
    assert num_recomputed() == 0


def test_wrong_arguments_are_refused() -> None:
    model = decoder()
    with pytest.raises(ValueError, match="policy='minimal'"):
        sg.remat(model, "minimal")
    with pytest.raises(TypeError, match="remat received 3"):
        sg.remat(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="remat received 'block_0'"):
        sg.remat(model, layers=["block_0"])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="a layer that is not in the model, and found nothing"):
        sg.remat(model, layers=[keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="layers='decoder', and found nothing"):
        sg.remat(model, layers="decoder")
    with pytest.raises(ValueError, match="no layers, and found nothing"):
        sg.remat(_tower())
