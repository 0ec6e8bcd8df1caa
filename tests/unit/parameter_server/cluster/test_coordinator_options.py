"""Limits as values: each of them changes what happens."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.cluster.cluster_plan import checked_options
from stratagem.parameter_server.coordinator.coordinated_workers import WorkerLink
from tests.unit.parameter_server.clusters import coordinated, local_strategy
from tests.unit.parameter_server.shared_with_workers import LIMIT_S, forget, note, seen, times_seen


@pytest.mark.parametrize(
    "given",
    [
        {"start_delay_s": -1},
        {"start_delay_s": "1"},
        {"recovery_timeout_s": -0.5},
        {"recovery_timeout_s": 0},
        {"max_transient_failures": -1},
        {"max_transient_failures": 1.5},
        {"journal_interval_s": -1.0},
        {"journal_interval_s": float("nan")},
        {"journal_interval_s": True},
        {"durable_updates": 1},
    ],
    ids=str,
)
def test_number_that_makes_no_sense_is_refused(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=r"sg\.coordinator\.options received") as caught:
        sg.coordinator.options(**given)
    assert f"{name}={value!r}" in str(caught.value)


def test_strategy_takes_options_and_nothing_else() -> None:
    with pytest.raises(TypeError, match="is of type dict"):
        sg.ParameterServerStrategy(options={"start_delay_s": 1})
    given = sg.coordinator.options(start_delay_s=1)
    assert checked_options(given, independent=False) is given
    assert checked_options(None, independent=True) == sg.coordinator.options()
    with pytest.raises(ValueError, match="A strategy that schedules no functions received"):
        checked_options(given, independent=True)
    with pytest.raises(AttributeError):
        given.start_delay_s = 2


class _Delays(threading.Event):
    """The end of a link, for which its threads wait as long as they delay; a delay ends by hand."""

    asked_s: list[float | None]
    are_over: threading.Event

    def wait(self, timeout: float | None = None) -> bool:
        self.asked_s.append(timeout)
        return not timeout or self.are_over.wait(LIMIT_S)


def test_workers_begin_one_after_the_other(monkeypatch) -> None:
    forget()
    init, asked_s, are_over = WorkerLink.__init__, [], threading.Event()

    def made(link: WorkerLink, *arguments: Any, **options: Any) -> None:
        init(link, *arguments, **options)
        link._is_closed = _Delays()
        link._is_closed.asked_s, link._is_closed.are_over = asked_s, are_over

    monkeypatch.setattr(WorkerLink, "__init__", made)
    options = sg.coordinator.options(start_delay_s=1000)
    with coordinated(num_workers=2, options=options) as coordinator:
        late = coordinator.schedule(note, args=(1,), worker=1)
        coordinator.schedule(note, args=(0,), worker=0).fetch()
        assert seen == [0]
        are_over.set()
        late.fetch()
        coordinator.schedule(note, args=(1,), worker=1).fetch()  # only the first one waits
    assert seen == [0, 1, 1]
    assert sorted(asked_s) == [0, 0, 1000, 1000]  # of each thread, once


def test_coordinator_that_is_closed_waits_for_no_delay() -> None:
    begun_s = time.monotonic()
    with coordinated(num_workers=2, options=sg.coordinator.options(start_delay_s=3600)):
        pass
    assert time.monotonic() - begun_s < 60


def test_silent_server_is_given_up_after_the_recovery_timeout() -> None:
    """Without the option that takes 30 s."""
    options = sg.coordinator.options(recovery_timeout_s=0.5)
    with local_strategy(num_servers=1, options=options) as strategy:
        coordinator = sg.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            v = sg.Variable(np.zeros(2, "float32"))

        def read() -> float:
            return float(v.value[0])

        assert coordinator.schedule(read).fetch() == 0
        strategy.cluster.servers[0].close()
        with pytest.raises(sg.errors.UnavailableError, match=r"gave no answer for 0\.5 s"):
            _ = v.value
        coordinator.schedule(read)
        with pytest.raises(sg.errors.PSUnavailableError, match=r"gave no answer for 0\.5 s"):
            coordinator.join()


@pytest.mark.filterwarnings("ignore:Failure . of at most 2 in a row:RuntimeWarning")
def test_failures_to_reach_a_server_are_tolerated_so_often_in_a_row() -> None:
    forget()
    options = sg.coordinator.options(max_transient_failures=2)
    with coordinated(options=options) as coordinator:

        def fail(times: int, name: str) -> str:
            note(name)
            if times_seen(name) <= times:
                raise sg.errors.UnavailableError("server 0 is silent")
            return name

        with pytest.warns(RuntimeWarning, match="of at most 2 in a row; retrying"):
            assert coordinator.schedule(fail, args=(2, "first")).fetch() == "first"
        assert coordinator.schedule(fail, args=(2, "second")).fetch() == "second"
        coordinator.schedule(fail, args=(9, "third"))
        with pytest.raises(sg.errors.PSUnavailableError, match="could not reach a parameter"):
            coordinator.join()
        assert [times_seen(name) for name in ("first", "second", "third")] == [3, 3, 3]
