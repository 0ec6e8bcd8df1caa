"""What a carry of `run_steps` may be, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg


@dataclasses.dataclass
class _Pair:
    total: Any
    last: Any


def _iterator(strategy: sg.Strategy) -> Any:
    return iter(strategy.distribute_dataset([(np.ones(4, "float32"), np.ones(4, "float32"))] * 4))


_WRONG = {
    "no_pair": (lambda carry, x, y: carry, 0.0, TypeError, "Expected a pair(?s:.)*return carry"),
    "structure": (
        lambda carry, x, y: ((carry, carry), None),
        0.0,
        ValueError,
        "received a carry of structure(?s:.)*the same keys",
    ),
    "shape": (
        lambda carry, x, y: ({"a": jnp.zeros(2)}, None),
        {"a": 0.0},
        ValueError,
        r"received carry\['a'\] of shape \(\)(?s:.)*returned shape \(2,\)",
    ),
    "dtype": (
        lambda carry, x, y: (jnp.float32(carry), None),
        0,
        ValueError,
        "dtype int32, but returned shape(?s:.)*cast the returned",
    ),
    "object": (
        lambda carry, x, y: (carry, None),
        {"a": "text"},
        TypeError,
        r"received carry\['a'\]='text' of type str(?s:.)*close over",
    ),
}


@pytest.mark.parametrize("name", _WRONG)
def test_wrong_carry_is_refused(execution, name) -> None:
    step, carry, error, message = _WRONG[name]
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(error, match=message):
        strategy.run_steps(step, _iterator(strategy), 2, carry=carry)


def test_carry_whose_parts_differ_in_shape_is_refused() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    parts = sg.regroup([jnp.ones(1), jnp.ones(2)])
    with pytest.raises(ValueError, match=r"parts of shapes \[\(1,\), (?s:.)*pad the parts"):
        strategy.run_steps(lambda carry, x, y: (carry, None), _iterator(strategy), 2, carry=parts)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_random_keys_are_carried(devices) -> None:
    def step(key: Any, x: Any, y: Any) -> Any:
        key, own = jax.random.split(key)
        return key, jax.random.uniform(own)

    strategy = sg.MirroredStrategy(devices)
    last, draws = strategy.run_steps(step, _iterator(strategy), 3, carry=jax.random.key(1))
    key, expected = jax.random.key(1), []
    for _ in range(3):
        key, own = jax.random.split(key)
        expected.append(float(jax.random.uniform(own)))
    for part, end in zip(strategy.local_results(draws), strategy.local_results(last), strict=True):
        np.testing.assert_allclose(part, expected)
        assert jax.random.key_data(end).tolist() == jax.random.key_data(key).tolist()


def test_dataclass_and_variable_in_a_carry() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        count = sg.Variable(1.0, aggregation="mean")

    def step(carry: _Pair, x: Any, y: Any) -> Any:
        count.assign_add(1.0)
        return _Pair(carry.total + carry.last, count), carry.last

    last, seen = strategy.run_steps(step, _iterator(strategy), 3, carry=_Pair(0.0, count))
    np.testing.assert_allclose(seen.components[1], [1.0, 2.0, 3.0])
    assert [float(part) for part in last.total.components] == [6.0, 6.0]
    assert [float(part) for part in last.last.components] == [4.0, 4.0]
