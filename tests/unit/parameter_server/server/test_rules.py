"""Optimizers of a server by name, and their scalars."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stratagem.parameter_server.server.store import Rules
from stratagem.parameter_server.server.updates import stored_name


class Rule:
    """A rule with a step count and a rate; it updates nothing."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def scalars(self) -> dict[str, np.ndarray]:
        return {"step": np.zeros((), np.int64), "rate": np.array(self.rate, np.float32)}

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Any]:
        return []

    def apply(self, state: Any, grads: Any) -> Any:
        return state

    def describe(self) -> dict[str, Any]:
        return {"rate": self.rate}


@pytest.fixture
def rules() -> Rules:
    made = Rules()
    made.set("sgd", Rule(0.1))
    made.set("adam", Rule(0.01))
    return made


def test_scalars_are_listed_by_optimizer_and_name(rules) -> None:
    assert rules.names == ["sgd", "adam"]
    assert {name: float(value) for name, value in rules.scalars.items()} == {
        stored_name("sgd", "step"): 0,
        stored_name("sgd", "rate"): pytest.approx(0.1),
        stored_name("adam", "step"): 0,
        stored_name("adam", "rate"): pytest.approx(0.01),
    }


def test_same_rule_again_keeps_its_scalars_and_another_one_is_refused(rules) -> None:
    rules.keep("sgd", {"step": np.array(5), "rate": np.array(0.2)})
    same = Rule(0.1)
    rules.set("sgd", same)
    assert rules.find("sgd", []) is same
    assert rules.scalars_of("sgd")["step"] == 5
    with pytest.raises(ValueError, match="already have another optimizer with this name"):
        rules.set("sgd", Rule(0.5))
    assert rules.find("sgd", []) is same


def test_scalar_is_set_in_its_own_dtype_for_its_optimizer_alone(rules) -> None:
    rules.set_scalar(stored_name("adam", "step"), np.array(7.0))
    assert rules.scalars_of("adam")["step"].dtype == np.int64
    assert (rules.scalars_of("adam")["step"], rules.scalars_of("sgd")["step"]) == (7, 0)
    for name in (stored_name("adam", "momentum"), stored_name("ftrl", "step"), "step"):
        with pytest.raises(KeyError, match="no scalar"):
            rules.set_scalar(name, np.array(1))


def test_optimizer_that_is_missing_or_dropped_is_named_by_its_variables(rules) -> None:
    rules.drop("sgd")
    rules.drop("never there")
    assert rules.names == ["adam"]
    assert stored_name("sgd", "step") not in rules.scalars
    with pytest.raises(RuntimeError, match=r"Gradients of \['kernel'\] were pushed before"):
        rules.find("sgd", ["kernel"])
