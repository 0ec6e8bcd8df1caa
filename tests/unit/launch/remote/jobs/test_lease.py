"""Lease of a client, renewed and expired."""

from __future__ import annotations

import threading

import pytest

from stratagem.errors import UnavailableError
from stratagem.launch.remote.jobs import lease
from stratagem.launch.remote.jobs.lease import Lease, LeaseWatch


class Packages:
    """What was uploaded, in memory."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.is_reached = True
        self.has_uploaded = threading.Semaphore(0)

    def has_package(self, name: str) -> bool:
        if not self.is_reached:
            raise UnavailableError("not now")
        return name in self.names

    def upload(self, name: str, content: bytes) -> None:
        if not self.is_reached:
            raise UnavailableError("not now")
        self.names.add(name)
        self.has_uploaded.release()


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    return now


def test_client_that_renews_is_alive_and_one_that_stops_is_not(clock) -> None:
    packages = Packages()
    watch = LeaseWatch(packages, "n", 30.0)
    assert watch.pause_s == 5.0
    packages.upload("stratagem_client_n_1.zip", b"")
    clock[0] += 29
    assert not watch.is_over()
    packages.upload("stratagem_client_n_2.zip", b"")
    packages.upload("stratagem_client_n_3.zip", b"")
    clock[0] += 29
    assert not watch.is_over()
    clock[0] += 29
    assert not watch.is_over()
    packages.upload("stratagem_client_other_4.zip", b"")
    clock[0] += 2
    assert watch.is_over()


def test_time_in_which_nobody_can_be_heard_does_not_count(clock) -> None:
    packages = Packages()
    watch = LeaseWatch(packages, "n", 30.0)
    packages.is_reached = False
    clock[0] += 100
    assert not watch.is_over()
    packages.is_reached = True
    clock[0] += 29
    assert not watch.is_over()
    clock[0] += 2
    assert watch.is_over()


def test_lease_counts_up_and_tries_again_what_has_failed() -> None:
    packages = Packages()
    with Lease(packages, "n", 0.06):
        for _ in range(2):
            assert packages.has_uploaded.acquire(timeout=120)
        packages.is_reached = False
        packages.is_reached = True
        for _ in range(2):
            assert packages.has_uploaded.acquire(timeout=120)
    assert {f"stratagem_client_n_{number}.zip" for number in (1, 2, 3, 4)} <= packages.names
    numbers = {int(name.split("_")[-1].removesuffix(".zip")) for name in packages.names}
    assert numbers == set(range(1, max(numbers) + 1))


def test_lease_of_a_cluster_that_is_not_reached_ends_in_order() -> None:
    packages = Packages()
    packages.is_reached = False
    with Lease(packages, "n", 0.06):
        pass
    assert packages.names == set()
