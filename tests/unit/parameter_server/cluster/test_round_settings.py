"""Methods of local updates that parameter servers apply, and those that they refuse."""

from __future__ import annotations

from typing import Any

import pytest

import stratagem as sg
from stratagem.parameter_server.cluster.cluster_plan import rounds_of, update_mode
from stratagem.parameter_server.server.updates import LocalRounds


def test_settings_are_those_of_the_method() -> None:
    method = sg.local_updates.LocalSGD(period=5, warmup_steps=2)
    assert rounds_of(method, 3, synchronous=False) == LocalRounds(5, 3, 3, 2)
    outer = sg.local_updates.DiLoCo(period=9, outer_momentum=0.5)
    assert rounds_of(outer, 3, synchronous=True) == LocalRounds(9, 3, 1, 0, 0.7, 0.5)


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (sg.local_updates.StreamingDiLoCo(), "a fragment would come to the servers at another"),
        (
            sg.local_updates.LocalSGD(period=sg.local_updates.QuadraticPeriod(base=4, growth=0.1)),
            "workers at different steps have different learning rates",
        ),
        (
            sg.local_updates.LocalUpdates(period=4),
            "LocalSGD or DiLoCo",
        ),
        (
            sg.local_updates.DiLoCo(compression="int8"),
            "the error of a compressed change would be lost with its worker",
        ),
    ],
)
def test_methods_that_servers_cannot_apply_are_refused(method: Any, told: str) -> None:
    with pytest.raises(NotImplementedError, match=told):
        rounds_of(method, 2, synchronous=False)


def test_something_else_is_no_method() -> None:
    with pytest.raises(TypeError, match=r"a method of sg\.local_updates, or None"):
        sg.ParameterServerStrategy(local_updates="DiLoCo")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "received"),
    [
        ({"synchronous": True, "backup_workers": 1, "max_staleness": None}, "backup_workers=1"),
        ({"synchronous": False, "backup_workers": 0, "max_staleness": 3}, "max_staleness=3"),
    ],
)
def test_pushes_are_never_discarded(options: dict[str, Any], received: str) -> None:
    method = sg.local_updates.LocalSGD()
    with pytest.raises(NotImplementedError, match="would take the work of a whole period") as info:
        update_mode(3, local_updates=method, **options)
    assert received in str(info.value)
