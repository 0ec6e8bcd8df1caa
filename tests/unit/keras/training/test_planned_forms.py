"""Models that compute in another form inside a block; searches test the rest."""

from __future__ import annotations

import keras

from stratagem.keras.training.planned_forms import computing_as, is_float32, repeated_blocks


def _model(count: int) -> keras.Model:
    x = inputs = keras.Input((8,))
    for _ in range(count):
        x = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(8)])(x)
    return keras.Model(inputs, x)


def test_forms_end_with_their_block() -> None:
    model = _model(2)
    blocks = repeated_blocks(model)
    assert len(blocks) == 2
    assert is_float32(model)
    with computing_as(model, "full", "mixed_bfloat16"):
        assert not is_float32(model)
        assert repeated_blocks(model) == []  # it recomputes already
    assert is_float32(model)
    assert repeated_blocks(model) == blocks


def test_a_model_without_blocks_keeps_its_form() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    assert repeated_blocks(model) == []
    with computing_as(model, None):
        assert is_float32(model)
