"""Workers of Ray Train, by a context that says what Ray's says."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest

from stratagem.cluster.addresses import split_address
from stratagem.cluster.detection import ray_train
from stratagem.cluster.processes import Processes


class Context:
    """The context of a training function."""

    def __init__(self, rank: int, size: int) -> None:
        self.get_world_rank = lambda: rank
        self.get_world_size = lambda: size


@pytest.fixture
def in_worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes this process a worker of Ray Train; `heard` is what rank 0 has sent."""
    for name in ("STRATAGEM_SECRET", "STRATAGEM_SECRET_FILE", "JAX_COORDINATOR_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def make(rank: int, size: int, heard: Any = None) -> None:
        train: Any = types.ModuleType("ray.train")
        train.get_context = lambda: Context(rank, size)
        collective: Any = types.ModuleType("ray.train.collective")
        collective.broadcast_from_rank_zero = lambda value: heard if value is None else value
        util: Any = types.ModuleType("ray.util")
        util.get_node_ip_address = lambda: "127.0.0.1"
        for module in (train, collective, util):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    return make


def test_rank_0_makes_the_address_and_the_secret(in_worker) -> None:
    in_worker(0, 2)
    found = ray_train()
    assert found is not None
    assert (found.num_processes, found.process_id) == (2, 0)
    assert split_address(str(found.coordinator_address))[0] == "127.0.0.1"
    assert len(os.environ["STRATAGEM_SECRET"]) == 64
    assert ray_train() == found  # without another exchange


def test_port_of_rank_0_can_be_chosen(in_worker, monkeypatch) -> None:
    in_worker(0, 2)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "2345")
    found = ray_train()
    assert found is not None
    assert found.coordinator_address == "127.0.0.1:2345"


def test_other_ranks_hear_both(in_worker) -> None:
    in_worker(1, 3, ("10.0.0.1:2222", "s" * 64))
    assert ray_train() == Processes(3, 1, "10.0.0.1:2222")
    assert os.environ["STRATAGEM_SECRET"] == "s" * 64


def test_secret_of_the_user_stays(in_worker, monkeypatch) -> None:
    in_worker(1, 3, ("10.0.0.1:2222", "s" * 64))
    monkeypatch.setenv("STRATAGEM_SECRET", "of the user")
    ray_train()
    assert os.environ["STRATAGEM_SECRET"] == "of the user"


def test_one_worker_exchanges_nothing(in_worker) -> None:
    in_worker(0, 1)
    assert ray_train() == Processes(1, 0)
    assert "STRATAGEM_SECRET" not in os.environ


@pytest.mark.parametrize("error", [RuntimeError, DeprecationWarning])
def test_outside_a_training_function_there_are_no_workers(in_worker, monkeypatch, error) -> None:
    in_worker(0, 2)

    def refuse() -> None:
        raise error("only in a training function")

    monkeypatch.setattr(sys.modules["ray.train"], "get_context", refuse)
    assert ray_train() is None


def test_without_ray_train_there_are_no_workers(monkeypatch) -> None:
    monkeypatch.delitem(sys.modules, "ray.train", raising=False)
    assert ray_train() is None
