"""The base class of strategies: its topology, and copies of subclasses."""

from __future__ import annotations

import copy

import jax
import pytest

import stratagem as sg
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.strategies.base.strategy import Strategy


def test_strategy_is_made_from_a_topology() -> None:
    with pytest.raises(TypeError, match=r"topology=\['cpu:0'\] is of type list"):
        Strategy(["cpu:0"])
    assert Strategy(Topology((jax.devices()[1],))).num_replicas_in_sync == 1


def test_a_deep_copy_keeps_what_a_subclass_added() -> None:
    class Named(sg.Strategy):
        def __init__(self) -> None:
            super().__init__(Topology(find_devices(["cpu:0"])))
            self.spare, self.notes = jax.devices("cpu")[1], ["first"]

    strategy = Named()
    copied = copy.deepcopy(strategy)
    assert copied.spare is strategy.spare
    assert copied.notes == ["first"]
    assert copied.notes is not strategy.notes
    assert copied.variables is not strategy.variables
