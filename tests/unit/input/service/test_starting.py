"""A service that `start` makes, on this machine and on Ray."""

from __future__ import annotations

import time

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service import starting
from stratagem.input.service import starting as scaling


def _numbers(service: sg.input.service.InputService) -> list[int]:
    distribute = sg.input.service.distribute("distributed_epoch", service.target, exactly_once=True)
    dataset = sg.input.Dataset(np.arange(90), batch_size=1).apply(distribute)
    return sorted(batch.item() for batch in dataset)


def test_workers_are_started_and_ended(monkeypatch) -> None:
    with sg.input.service.start(1) as service:
        assert service.num_workers == 1
        assert len(service.describe()["workers"]) == 1
        assert _numbers(service) == list(range(90))
    service.close()
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "1")
    with pytest.raises(sg.errors.UnavailableError, match="Input dispatcher"):
        sg.input.service.register_dataset(service.target, sg.input.Dataset([np.arange(2)]))


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_ray_places_the_workers_and_starts_a_killed_one_again() -> None:
    with sg.input.service.start(2) as service:
        pids = service._workers.pids
        assert _numbers(service) == list(range(90))
        service._workers.kill(0)
        assert _numbers(service) == list(range(90))
        service._workers.add()
        assert service.num_workers == 3
        service._workers.remove()
        service._workers.remove()
        assert service.num_workers == 1
        assert _numbers(service) == list(range(90))
        assert pids[0] not in service._workers.pids


class _Slow:
    def __len__(self) -> int:
        return 400

    def __getitem__(self, number: int) -> np.ndarray:
        time.sleep(0.05)
        return np.array(number)


@pytest.mark.slow
def test_workers_are_added_while_a_trainer_waits_and_end_when_it_does_not(monkeypatch) -> None:
    monkeypatch.setattr(starting, "_SCALING_S", 0.5)
    monkeypatch.setattr(scaling.Scaler.__init__, "__defaults__", (1.0,))
    with sg.input.service.start(1, max_workers=3) as service:
        distribute = sg.input.service.distribute(
            "distributed_epoch", service.target, exactly_once=True
        )
        dataset = sg.input.Dataset(_Slow(), batch_size=1).apply(distribute)
        found, counts = [], []
        for batch in dataset:
            found.append(batch.item())
            counts.append(service.num_workers)
            time.sleep(0.01 if len(found) < 300 else 0.15)
        assert sorted(found) == list(range(400))
        assert counts[0] == 1
        assert max(counts) == 3
        deadline_s = time.monotonic() + 60
        while service.num_workers > 1:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


@pytest.mark.parametrize(
    ("num_workers", "limits"),
    [(0, {}), (2, {"max_workers": 1}), (2, {"min_workers": 3}), (1, {"min_workers": 0})],
)
def test_the_number_of_workers_is_checked(num_workers, limits) -> None:
    with pytest.raises(ValueError, match=f"num_workers={num_workers} and .* are out of range"):
        sg.input.service.start(num_workers, **limits)
