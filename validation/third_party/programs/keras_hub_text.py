"""Language models of KerasHub, at small sizes, with random weights and vocabularies made here."""

from __future__ import annotations

from typing import Any

import keras
import keras_hub
import numpy as np

from validation.third_party.programs.measuring import (
    Measurements,
    Place,
    Program,
    fitted,
    measured,
    with_large_weights,
)

_BATCH_SIZE = 4
_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "was", "good", "bad", "dull")
_REVIEWS = (
    "the film was good",
    "the film was bad",
    "good film",
    "dull the film was dull",
    "bad film",
    "was the film good",
    "the dull film",
)
_VERDICTS = np.array([1, 0, 1, 0, 0, 1, 0], "int32")
_VOCABULARY_SIZE = 19


def _bert_backbone(vocabulary_size: int = len(_WORDS)) -> Any:
    return keras_hub.models.BertBackbone(
        vocabulary_size=vocabulary_size,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        dropout=0.0,
        max_sequence_length=8,
    )


def _compile_classifier(model: Any) -> None:
    with_large_weights(model)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def bert_classifier(place: Place) -> Measurements:
    """Token ids in; one sequence is shorter than the others."""
    random = np.random.default_rng(0)
    inputs = {
        "token_ids": random.integers(1, len(_WORDS), (7, 8)).astype("int32"),
        "segment_ids": random.integers(0, 2, (7, 8)).astype("int32"),
        "padding_mask": (np.arange(8) < random.integers(3, 9, 7)[:, None]).astype("int32"),
    }
    with place.scope():
        model = keras_hub.models.BertTextClassifier(
            backbone=_bert_backbone(), num_classes=2, dropout=0.0, preprocessor=None
        )
        _compile_classifier(model)
    return measured(place, model, inputs, _VERDICTS, _BATCH_SIZE)


def bert_classifier_of_strings(place: Place) -> Measurements:
    """Strings in; KerasHub tokenizes them in a Grain pipeline."""
    tokenizer = keras_hub.tokenizers.BertTokenizer(vocabulary=list(_WORDS))
    preprocessor = keras_hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    with place.scope():
        model = keras_hub.models.BertTextClassifier(
            backbone=_bert_backbone(), num_classes=2, dropout=0.0, preprocessor=preprocessor
        )
        _compile_classifier(model)
    return measured(place, model, list(_REVIEWS), _VERDICTS, _BATCH_SIZE)


def _token_rows(num_rows: int, length: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    true_lengths = random.integers(3, length + 1, num_rows)
    mask = np.arange(length) < true_lengths[:, None]
    tokens = np.where(mask, random.integers(1, _VOCABULARY_SIZE, (num_rows, length)), 0)
    return {"token_ids": tokens.astype("int32"), "padding_mask": mask.astype("int32")}


def _next_tokens(inputs: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Labels and weights: each token is to predict the one after it, padding nothing."""
    labels = np.roll(inputs["token_ids"], -1, axis=1)
    weights = np.roll(inputs["padding_mask"], -1, axis=1).astype("float32")
    weights[:, -1] = 0.0
    return labels, weights


def _prompts(num_rows: int, length: int) -> dict[str, np.ndarray]:
    tokens = np.zeros((num_rows, length), "int32")
    tokens[:, :3] = np.random.default_rng(2).integers(1, _VOCABULARY_SIZE, (num_rows, 3))
    return {"token_ids": tokens, "padding_mask": (tokens > 0).astype("int32")}


def _trained_and_generated(model: Any, place: Place, samplers: list[Any]) -> Measurements:
    """Trains on rows of unequal lengths, then generates with each sampler."""
    inputs = _token_rows(num_rows=7, length=8)
    labels, weights = _next_tokens(inputs)
    results = {
        **fitted(place, model, inputs, labels, sample_weight=weights, batch_size=_BATCH_SIZE),
        "predict": model.predict(inputs, batch_size=_BATCH_SIZE, verbose=0),
        "evaluate": model.evaluate(
            inputs, labels, sample_weight=weights, batch_size=_BATCH_SIZE, verbose=0
        ),
    }
    for number, sampler in enumerate(samplers):
        with place.scope():
            model.compile(sampler=sampler())
        prompts = _prompts(num_rows=3, length=8)
        output = model.generate(prompts, stop_token_ids=None)
        results[f"generated {number}"] = output["token_ids"]
    return results


def _compile_language_model(model: Any) -> None:
    with_large_weights(model)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )


def gpt2_causal_lm(place: Place) -> Measurements:
    """Greedy, beam and seeded random sampling."""
    with place.scope():
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=_VOCABULARY_SIZE,
            num_layers=1,
            num_heads=2,
            hidden_dim=8,
            intermediate_dim=16,
            dropout=0.0,
            max_sequence_length=8,
        )
        model = keras_hub.models.GPT2CausalLM(backbone=backbone, preprocessor=None)
        _compile_language_model(model)
    samplers = [
        keras_hub.samplers.GreedySampler,
        lambda: keras_hub.samplers.BeamSampler(num_beams=2),
        lambda: keras_hub.samplers.TopKSampler(k=5, seed=3),
    ]
    return _trained_and_generated(model, place, samplers)


def gemma_with_lora(place: Place) -> Measurements:
    """Only the adapters of rank 2 are trained; the backbone is frozen."""
    with place.scope():
        backbone = keras_hub.models.GemmaBackbone(
            vocabulary_size=_VOCABULARY_SIZE,
            num_layers=1,
            num_query_heads=2,
            num_key_value_heads=1,
            hidden_dim=8,
            intermediate_dim=16,
            head_dim=4,
        )
        backbone.enable_lora(rank=2)
        model = keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)
        _compile_language_model(model)
    results = _trained_and_generated(model, place, [keras_hub.samplers.GreedySampler])
    return {**results, "number of trained variables": len(model.trainable_variables)}


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (bert_classifier, bert_classifier_of_strings, gpt2_causal_lm, gemma_with_lora)
}
