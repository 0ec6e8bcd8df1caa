"""Selection of predictions: computes only the requested ones, in their order."""

from __future__ import annotations

import pytest

from stratagem.estimator.heads.classification import select


def refuse() -> None:
    raise AssertionError("was not requested")


def test_all_are_computed_in_the_order_of_the_head() -> None:
    available = {"logits": lambda: 1, "classes": lambda: 2}
    assert list(select(available, None).items()) == [("logits", 1), ("classes", 2)]


def test_only_requested_ones_are_computed_in_the_order_of_the_request() -> None:
    available = {"a": lambda: 1, "b": refuse, "c": lambda: 3}
    assert list(select(available, ["c", "a"]).items()) == [("c", 3), ("a", 1)]


def test_unknown_keys_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"keys \['x', 'y'\] are unknown.*\n.*\['a'\]"):
        select({"a": refuse}, ["x", "a", "y"])
