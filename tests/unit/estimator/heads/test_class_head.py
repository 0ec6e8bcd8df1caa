"""Class names and ids that heads of two and of many classes share."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator.heads.classification import ClassHead

HEADS = [
    sg.estimator.BinaryClassHead(label_vocabulary=["a", "b"]),
    sg.estimator.MultiClassHead(3, label_vocabulary=["a", "b", "c"]),
]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_names_and_ids_are_inverse_to_one_another(head) -> None:
    assert isinstance(head, ClassHead)
    ids = head.encode_labels(["b", "a", "b"])
    assert ids.tolist() == [1, 0, 1]
    assert head.decode({"classes": ids})["classes"].tolist() == [b"b", b"a", b"b"]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: type(head).__name__)
def test_only_names_of_classes_are_decoded(head) -> None:
    predictions = {"class_ids": np.array([[1]]), "logits": np.ones((1, 3))}
    decoded = head.decode(dict(predictions))
    assert decoded.keys() == predictions.keys()
    assert all(decoded[key] is value for key, value in predictions.items())


def test_classes_without_a_vocabulary_are_named_by_their_numbers() -> None:
    head = sg.estimator.MultiClassHead(12)
    assert head.decode({"classes": np.array([11, 2])})["classes"].tolist() == [b"11", b"2"]
