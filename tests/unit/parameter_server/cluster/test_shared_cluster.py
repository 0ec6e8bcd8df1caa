"""A chief and a worker that each run the program, on servers of a third machine."""

from __future__ import annotations

import contextlib
import json
import types
from typing import Any

import pytest
import ray

from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import DeadlineExceededError
from stratagem.launch.remote.ray.server_registry import ServerRegistry
from stratagem.parameter_server.cluster.shared_cluster import SharedCluster
from tests.multiprocess.namespaces import can_make_hosts
from tests.unit.parameter_server.machines import run_on_machines

_NETWORK = "10.81.0"
_CLUSTER = {
    "chief": [f"{_NETWORK}.1:2222"],
    "worker": [f"{_NETWORK}.2:2222"],
    "ps": [f"{_NETWORK}.3:2222"],
}
_PROGRAM = """
import json, os, time
import stratagem as sg
import keras
import numpy as np

x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
y = x @ np.float32([[1], [2], [3], [4]])
with sg.ParameterServerStrategy(independent=True) as strategy:
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, name="out")])
        model.compile(keras.optimizers.Adam(0.05), "mse")
    history = model.fit(x, y, batch_size=32, epochs=20, verbose=0).history
    while int(model.optimizer.iterations) < 320:  # of both
        time.sleep(0.05)
    weights = np.asarray(model.layers[0].kernel).ravel().tolist()
    task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    print(json.dumps([task, history["loss"], weights]), flush=True)
    if task == "worker":
        time.sleep(3)  # the servers are there as long as somebody uses them
        assert np.asarray(model.layers[0].kernel).ravel().tolist() == weights
"""


class NoActors:
    """Ray, where nobody has made an actor."""

    def get_actor(self, name: str, namespace: str) -> Any:
        raise ValueError(name)


class Present:
    """Ray and a meeting in one, of whose two machines one has gone."""

    def __init__(self) -> None:
        self.meeting = ServerRegistry(b"", [])

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}]


def member(task: tuple[str, int], ray: Any) -> Any:
    """One that has not entered."""
    made: Any = object.__new__(SharedCluster)
    made._spec, made._task, made._ray, made._worker = ClusterSpec(_CLUSTER), task, ray, 0
    made._is_leader = task == ("chief", 0)
    made._closing = contextlib.ExitStack()
    made._num_trainings = 0
    return made


def test_leader_that_does_not_come_is_named(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.3")
    words = r"The leader, \('chief', 0\), did not publish the servers' addresses within 0.3 s"
    with pytest.raises(DeadlineExceededError, match=words):
        member(("worker", 0), NoActors())._found()


def test_nobody_coordinates_workers_with_programs_of_their_own() -> None:
    with pytest.raises(RuntimeError, match="created in a worker that runs its own program"):
        member(("worker", 0), None).start_workers()


def test_server_is_nowhere_known_once_the_leader_is_gone() -> None:
    gone = member(("worker", 0), types.SimpleNamespace(exceptions=ray.exceptions))

    def ask(*arguments: object) -> None:
        raise ray.exceptions.GetTimeoutError(str(arguments))

    gone._asked = ask
    assert gone._announced_address(0) is None


def test_workers_wait_until_the_leader_has_begun_a_training() -> None:
    meeting = ServerRegistry(b"", [])

    def asked(method: str, *arguments: Any) -> Any:
        return getattr(meeting, method)(*arguments)

    leader, worker = member(("chief", 0), None), member(("worker", 0), None)
    leader._asked = worker._asked = asked
    assert [worker.next_training(), worker.next_training()] == [1, 2]
    with pytest.raises(DeadlineExceededError, match=r"did not begin training 1 within 0.1 s"):
        worker.wait_for_begin(1, 0.1)
    leader.begin(2)
    leader.begin(1)  # of a training that a late one comes to
    worker.wait_for_begin(1, 0.1)
    worker.wait_for_begin(2, 0.1)
    with pytest.raises(DeadlineExceededError, match="did not begin training 3"):
        worker.wait_for_begin(3, 0.1)


def test_leader_waits_for_those_whose_machines_are_there(monkeypatch) -> None:
    machines = Present()
    leader = member(("chief", 0), machines)
    leader._asked = lambda method, *arguments: getattr(machines.meeting, method)(*arguments)
    for worker, node in enumerate("aab"):
        machines.meeting.enter(worker, node)
    monkeypatch.setenv("STRATAGEM_BARRIER_TIMEOUT_S", "0.3")
    with pytest.warns(
        RuntimeWarning, match=r"Workers \[1\] are still running 0.3 s after the leader"
    ):
        leader.close()
    leader.close()  # again, which does nothing


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces can be made here")
def test_chief_and_worker_train_one_model_by_programs_of_their_own(tmp_path) -> None:
    outputs = run_on_machines(_PROGRAM, _CLUSTER, _NETWORK, tmp_path)
    said = [json.loads(output.splitlines()[-1]) for output in outputs[:2]]
    assert [one[0] for one in said] == ["chief", "worker"]
    for _, losses, _ in said:
        assert losses[-1] < 0.2 * losses[0]
    assert said[0][2] == said[1][2]  # both have read what both have learned
