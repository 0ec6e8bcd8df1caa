"""What is measured of each axis, at small sizes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.growth.axes import AXES, Axis
from benchmarks.growth.costs.serving import cpu_s, elapsed_s, least

# The number of devices of a process is fixed once JAX runs: test_run.py has these axes.
_HERE = [axis for axis in AXES if axis.module != "steps"]
_SLOW = {"workers", "simulated workers", "closures", "coordinated workers"}


def _marked(axis: Axis) -> Any:
    return pytest.param(axis, id=axis.name, marks=pytest.mark.slow if axis.name in _SLOW else ())


@pytest.mark.parametrize("axis", [_marked(axis) for axis in _HERE])
def test_all_costs_are_measured(axis: Axis) -> None:
    module: Any = importlib.import_module(f"benchmarks.growth.costs.{axis.module}")
    answer: Mapping[str, Any] = module.measure(**axis.question(axis.quick_sizes[0], is_quick=True))
    assert list(answer) == ["ours"]
    assert answer["ours"].keys() >= axis.costs.keys()
    assert all(seconds >= 0 for seconds in answer["ours"].values())


def test_axes_are_in_order() -> None:
    names = [axis.name for axis in AXES]
    assert len(set(names)) == len(names)
    for axis in AXES:
        sizes = [*axis.sizes, *axis.long_sizes]
        assert sorted(set(sizes)) == sizes
        assert len(axis.sizes) >= 3
        assert len(axis.quick_sizes) == 2


def test_time_of_a_call_is_the_least_of_several() -> None:
    times = iter([3.0, 1.0, 2.0])
    assert least(3, lambda: next(times)) == 1.0
    assert 0 <= cpu_s(lambda: None) < 1
    assert 0 <= elapsed_s(lambda: None) < 60
