"""Plugin that makes a run of the tests as unlike the usual one as another machine might.

`CLOCK_STEP_S=0.01 ORDER_SEED=3 python -m pytest -p tests.other_machine tests/unit/group` floors all
clocks of Python to 10 ms, as some systems do, and shuffles the files, and the tests of each.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

import pytest


def floored(read: Callable[[], Any], step: Any) -> Callable[[], Any]:
    """A clock that shows only multiples of `step`."""
    return lambda: read() // step * step


def shuffled(files: list[str], seed: int) -> list[int]:
    """An order of tests, given the file of each: those of a file stay together."""
    chance = random.Random(seed)
    by_file: dict[str, list[int]] = {}
    for place, file in enumerate(files):
        by_file.setdefault(file, []).append(place)
    groups = list(by_file.values())
    chance.shuffle(groups)
    for places in groups:
        chance.shuffle(places)
    return [place for places in groups for place in places]


if "CLOCK_STEP_S" in os.environ:
    _step_s = float(os.environ["CLOCK_STEP_S"])
    for _name in ("time", "monotonic", "perf_counter"):
        setattr(time, _name, floored(getattr(time, _name), _step_s))
        setattr(time, f"{_name}_ns", floored(getattr(time, f"{_name}_ns"), int(_step_s * 1e9)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Shuffles the tests if there is a seed."""
    if "ORDER_SEED" in os.environ:
        order = shuffled([str(item.path) for item in items], int(os.environ["ORDER_SEED"]))
        items[:] = [items[place] for place in order]
