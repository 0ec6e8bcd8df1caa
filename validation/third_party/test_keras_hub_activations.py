"""KerasHub's models with less memory of activations: rematerialization, and losses in chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest

import stratagem as sg

_VOCABULARY_SIZE = 19
_RANDOM = np.random.default_rng(0)
_TOKENS = _RANDOM.integers(1, _VOCABULARY_SIZE, (7, 8)).astype("int32")
_MASK = (np.arange(8) < _RANDOM.integers(3, 9, 7)[:, None]).astype("int32")
_INPUTS = {"token_ids": _TOKENS, "padding_mask": _MASK}
_LABELS = np.roll(_TOKENS, -1, axis=1)

_SIZES: dict[str, Any] = {
    "vocabulary_size": _VOCABULARY_SIZE,
    "num_layers": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}


def _llama() -> Any:
    backbone = keras_hub.models.LlamaBackbone(
        **_SIZES, num_query_heads=2, num_key_value_heads=1, dropout=0.1
    )
    return keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)


def _gemma() -> Any:
    backbone = keras_hub.models.GemmaBackbone(
        **_SIZES,
        num_query_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        final_logit_soft_cap=5.0,
        attention_logit_soft_cap=5.0,
    )
    return keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)


def _gpt2() -> Any:
    backbone = keras_hub.models.GPT2Backbone(
        **_SIZES, num_heads=2, dropout=0.1, max_sequence_length=8
    )
    return keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)


def _bert() -> Any:
    return keras_hub.models.BertBackbone(**_SIZES, num_heads=2, dropout=0.1, max_sequence_length=8)


def _fitted(model: Any, loss: Any) -> Any:
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=loss)
    weights = _MASK.astype("float32")
    history = model.fit(
        _INPUTS, _LABELS, sample_weight=weights, batch_size=4, shuffle=False, verbose=0
    )
    return history.history["loss"], [np.asarray(one.value) for one in model.weights]


def _assert_equal(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for own, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1e-6)


def _trained(make: Callable[[], Any], remat: contextlib.AbstractContextManager[Any]) -> Any:
    keras.utils.set_random_seed(0)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all")
    with strategy.scope(), remat:
        model = make()
        return _fitted(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True))


@pytest.mark.parametrize("make", [_llama, _gemma])
def test_models_train_in_a_remat_scope(make: Callable[[], Any]) -> None:
    recomputed = _trained(make, keras.RematScope(mode="full"))
    _assert_equal(recomputed, _trained(make, contextlib.nullcontext()))


@pytest.mark.parametrize("make", [_llama, _gemma, _gpt2, _bert])
def test_blocks_of_a_finished_model_are_found(make: Callable[[], Any]) -> None:
    classes = {type(block).__name__ for block in sg.remat(make())}
    assert len(classes) == 1
    assert next(iter(classes)).endswith(("Decoder", "DecoderBlock", "TransformerEncoder"))


def test_a_backbone_trains_with_a_loss_in_chunks() -> None:
    results = []
    for is_chunked in (True, False):
        keras.utils.set_random_seed(0)
        with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            model = _gemma()
            sg.remat(model)
            head = model.backbone.token_embedding
            loss = sg.nn.ChunkedSparseCategoricalCrossentropy(head, chunk_size=5)
            if is_chunked:
                results.append(_fitted(model.backbone, loss))
            else:
                whole = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
                results.append(_fitted(model, whole))
    _assert_equal(*results)


@pytest.mark.parametrize("make", [_llama, _gpt2])
def test_models_train_with_their_blocks_in_one_loop(make: Callable[[], Any]) -> None:
    def scanned() -> Any:
        model = make()
        assert len(sg.scan_layers(model)) == 2
        sg.remat(model)
        return model

    one_by_one = _trained(make, contextlib.nullcontext())
    _assert_equal(_trained(scanned, contextlib.nullcontext()), one_by_one)


def test_a_model_with_blocks_in_one_loop_generates() -> None:
    model = _llama()
    model.compile(sampler="greedy")
    expected = model.generate(_INPUTS, stop_token_ids=None)
    sg.scan_layers(model)
    model.compile(sampler="greedy")
    found = model.generate(_INPUTS, stop_token_ids=None)
    np.testing.assert_array_equal(found["token_ids"], expected["token_ids"])
