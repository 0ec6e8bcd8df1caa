"""The executor of the coordinator."""

from __future__ import annotations

import functools
import warnings

import stratagem as sg
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.parameter_server.coordinator.shipping import Scheduling
from stratagem.parameter_server.keras.pickling import KERAS_PACKING


def _strategy() -> sg.Strategy:
    executor = functools.partial(Scheduling, packing=KERAS_PACKING)
    return sg.Strategy(Topology(find_devices(["cpu:0"])), executor=executor)


def test_warning_names_the_line_that_called_run() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert _strategy().run(lambda: 3) == 3
    (warning,) = [one for one in found if "runs there" in str(one.message)]
    assert warning.filename == __file__


def test_nothing_is_settled_or_closed_without_a_coordinator() -> None:
    executor = _strategy().executor
    assert isinstance(executor, Scheduling)
    executor.settle()
    executor.close()
    assert executor.coordinator is None
