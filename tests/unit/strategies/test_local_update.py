"""`LocalUpdateStrategy`: its arguments, and the sizes of its islands."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import stratagem as sg
from stratagem.strategies.local_update import islands_of


def test_method_is_local_sgd_by_default() -> None:
    strategy = sg.LocalUpdateStrategy(devices=["cpu:0", "cpu:1"])
    assert strategy.local_updates == sg.local_updates.LocalSGD()
    assert strategy.num_replicas_in_sync == 2
    assert sg.LocalUpdateStrategy().cluster_resolver.task_type is None
    with pytest.raises(TypeError, match="method='diloco' is of type str"):
        sg.LocalUpdateStrategy("diloco")


def test_devices_and_a_cluster_are_refused() -> None:
    resolver = sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec({"worker": ["127.0.0.1:1234"]})
    )
    with pytest.raises(ValueError, match="a cluster resolver were given"):
        sg.LocalUpdateStrategy(devices=["cpu:0"], cluster_resolver=resolver)


# Islands of a topology: sizes that fit, and those that are refused.


def topology(*of_processes, groups=None) -> Any:
    """Stands in for a topology of processes with numbers of devices."""
    devices = tuple(
        SimpleNamespace(process_index=place)
        for place, count in enumerate(of_processes)
        for _ in range(count)
    )
    return SimpleNamespace(num_replicas=len(devices), devices=devices, groups=groups)


@pytest.mark.parametrize(
    ("of_processes", "given", "size"),
    [
        ((4, 4), 1, 1),
        ((4, 4), 2, 2),
        ((4, 4), 4, 4),
        ((4, 4), 8, 8),
        ((4, 4), "process", 4),
        ((1, 1, 1, 1), "process", 1),
        ((1, 1, 1, 1), 2, 2),
        ((8,), "process", 8),
        ((4, 2), 2, 2),
    ],
)
def test_size_of_islands(of_processes, given, size) -> None:
    islands = islands_of(topology(*of_processes), given)
    assert (islands.num_replicas, islands.size) == (sum(of_processes), size)


_UNEVEN = 'pass "process" to train in lockstep'


@pytest.mark.parametrize(
    ("of_processes", "given", "error", "message"),
    [
        *[((4, 4), given, ValueError, _UNEVEN) for given in (0, -2, 3, 16)],
        *[((4, 4), given, TypeError, 'or "process"') for given in (2.0, True, None, "machine")],
        ((3, 3), 2, ValueError, "lockstep is for the fast links"),  # parts of processes
        ((4, 2), "process", ValueError, "or pass replicas_per_island=1"),
    ],
)
def test_other_sizes_of_islands_are_refused(of_processes, given, error, message) -> None:
    with pytest.raises(error, match=message):
        islands_of(topology(*of_processes), given)
    with pytest.raises(ValueError, match="pass a flat list of devices"):
        islands_of(topology(4, groups=((),)), 2)


def test_strategy_has_islands() -> None:
    devices = [f"cpu:{index}" for index in range(4)]
    strategy = sg.LocalUpdateStrategy(devices=devices, replicas_per_island=2)
    assert (strategy.num_islands, strategy.num_replicas_in_sync) == (2, 4)
    assert sg.LocalUpdateStrategy(devices=devices).num_islands == 4
    alone = sg.LocalUpdateStrategy(devices=devices, replicas_per_island="process")
    assert (alone.num_islands, alone.islands) == (1, None)
