"""Methods of training with local steps: defaults and bad input."""

from __future__ import annotations

import pytest

import stratagem as sg

LOCAL_SGD, DILOCO = sg.local_updates.LocalSGD, sg.local_updates.DiLoCo
STREAMING, QUADRATIC = sg.local_updates.StreamingDiLoCo, sg.local_updates.QuadraticPeriod


def test_defaults_are_those_of_the_papers() -> None:
    assert (DILOCO().period, DILOCO().outer_learning_rate, DILOCO().outer_momentum) == (
        500,
        0.7,
        0.9,
    )
    assert (LOCAL_SGD().period, LOCAL_SGD().warmup_steps) == (8, 0)
    assert LOCAL_SGD().compression is None
    assert LOCAL_SGD(compression="int8").compression == sg.compression.Int8()


@pytest.mark.parametrize(
    ("kind", "name", "value", "error"),
    [
        (LOCAL_SGD, "period", 0, ValueError),
        (LOCAL_SGD, "period", 2.0, TypeError),
        (LOCAL_SGD, "period", True, TypeError),
        (LOCAL_SGD, "warmup_steps", -1, ValueError),
        (DILOCO, "outer_momentum", 1.5, ValueError),
        (DILOCO, "outer_learning_rate", "0.7", TypeError),
        (STREAMING, "fragments", 0, ValueError),
        (STREAMING, "overlap", 100, ValueError),
        (STREAMING, "own_share", 2, ValueError),
    ],
)
def test_invalid_number_is_refused(kind, name, value, error) -> None:
    with pytest.raises(error, match=f"{kind.__name__} received {name}={value!r}"):
        kind(**{name: value})


def test_unknown_compression_is_refused() -> None:
    with pytest.raises(ValueError, match="compression='zip' is not a known compression"):
        LOCAL_SGD(compression="zip")


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("base", 0, ValueError),
        ("base", 2.5, TypeError),
        ("growth", 0, ValueError),
        ("growth", -0.1, ValueError),
        ("growth", "0.1", TypeError),
        ("total_steps", 0, ValueError),
        ("total_steps", 1e3, TypeError),
    ],
)
def test_invalid_number_of_a_rule_is_refused(name, value, error) -> None:
    with pytest.raises(error, match=f"QuadraticPeriod received {name}={value!r}"):
        QUADRATIC(**{"base": 4, "growth": 0.1, name: value})


def test_period_may_be_a_rule_but_for_fragments() -> None:
    rule = QUADRATIC(base=4, growth=0.1)
    assert LOCAL_SGD(period=rule).period is rule
    assert DILOCO(period=rule).period is rule
    with pytest.raises(TypeError, match="fragments are sent at fixed steps"):
        STREAMING(period=rule)
