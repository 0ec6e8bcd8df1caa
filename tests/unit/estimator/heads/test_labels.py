"""Labels of classification heads: strings and ids, shapes and ranges."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg

LABELS = np.array([[1], [1], [0], [1], [0]], np.int32)
LOGITS = np.array([[-2.0], [3.0], [0.5], [1.5], [-1.0]], np.float32)


@pytest.mark.parametrize(
    ("labels", "expected"),
    [(["b", "a"], [1, 0]), (np.array([[b"a"]]), [[0]]), (np.array(["a"], object), [0])],
)
def test_labels_that_are_strings_become_ids(labels, expected) -> None:
    head = sg.estimator.BinaryClassHead(label_vocabulary=["a", b"b"])
    ids = head.encode_labels(labels)
    assert (ids.tolist(), ids.dtype) == (expected, np.int32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda e: e.BinaryClassHead(label_vocabulary=["a"]), "label_vocabulary="),
        (lambda e: e.BinaryClassHead().encode_labels(["a"]), "do not fit label_vocabulary="),
        (
            lambda e: e.BinaryClassHead(label_vocabulary=["a", "b"]).encode_labels(["c"]),
            "are not in the vocabulary",
        ),
        (lambda e: e.MultiClassHead(3).encode_labels([3]), "Labels range from 3 to 3"),
        (lambda e: e.RegressionHead().encode_labels(["a"]), "Labels of a regression have dtype"),
        (lambda e: e.BinaryClassHead().loss(LABELS[:2], LOGITS), "labels have shape"),
        (
            lambda e: e.MultiClassHead(3).loss(np.ones((2, 1), np.float32), np.ones((2, 3))),
            "labels have dtype float32",
        ),
    ],
)  # fmt: skip
def test_misuse_is_refused(call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(sg.estimator)
