"""A chief and a worker that each run the program, on servers of a third machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import ray

from stratagem.cluster import ClusterSpec
from stratagem.coordinator.shared_cluster import SharedCluster
from stratagem.errors import DeadlineExceededError
from stratagem.remote.meeting import Meeting
from tests.multiprocess.namespaces import can_make_hosts, hosts
from tests.remote.living import descendants, wait_for_end

_SOURCE = Path(__file__).parents[2] / "src"
_LIMIT_S = 150.0
_NETWORK = "10.81.0"
_CLUSTER = {
    "chief": [f"{_NETWORK}.1:2222"],
    "worker": [f"{_NETWORK}.2:2222"],
    "ps": [f"{_NETWORK}.3:2222"],
}
_TASKS = [("chief", 0), ("worker", 0), ("ps", 0)]
# Machines do not share it; `ip netns exec` has a view of its own of what is mounted.
_OWN_RAY_FOLDER = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$0" "$@"'
_SERVER = "from stratagem.cli import main; main()"
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
        self.meeting = Meeting(b"", [])

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": "a", "Alive": True}, {"NodeID": "b", "Alive": False}]


def member(task: tuple[str, int], ray: Any) -> Any:
    """One that has not entered."""
    made: Any = object.__new__(SharedCluster)
    made._spec, made._task, made._ray, made._worker = ClusterSpec(_CLUSTER), task, ray, 0
    made._is_leader = task == ("chief", 0)
    made._closing = contextlib.ExitStack()
    return made


def test_leader_that_does_not_come_is_named(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.3")
    words = r"The leader, \('chief', 0\), has not told within 0.3 s where the servers are"
    with pytest.raises(DeadlineExceededError, match=words):
        member(("worker", 0), NoActors())._found()


def test_nobody_coordinates_workers_with_programs_of_their_own() -> None:
    with pytest.raises(RuntimeError, match="made in a worker that runs a program of its own"):
        member(("worker", 0), None).start_workers(print)


def test_server_is_nowhere_known_once_the_leader_is_gone() -> None:
    gone = member(("worker", 0), types.SimpleNamespace(exceptions=ray.exceptions))

    def ask(*arguments: object) -> None:
        raise ray.exceptions.GetTimeoutError(str(arguments))

    gone._asked = ask
    assert gone._told_address(0) is None


def test_leader_waits_for_those_whose_machines_are_there(monkeypatch) -> None:
    machines = Present()
    leader = member(("chief", 0), machines)
    leader._asked = lambda method, *arguments: getattr(machines.meeting, method)(*arguments)
    for worker, node in enumerate("aab"):
        machines.meeting.enter(worker, node)
    monkeypatch.setenv("STRATAGEM_BARRIER_TIMEOUT_S", "0.3")
    with pytest.warns(RuntimeWarning, match=r"Workers \[1\] have not finished 0.3 s after"):
        leader.close()
    leader.close()  # again, which does nothing


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces can be made here")
def test_chief_and_worker_train_one_model_by_programs_of_their_own(tmp_path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    variables = {
        **os.environ,
        "PYTHONPATH": str(_SOURCE),
        "JAX_PLATFORMS": "cpu",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    }
    before = descendants(os.getpid())
    outputs: list[str] = []
    with hosts(len(_TASKS), _NETWORK) as made:
        processes: list[subprocess.Popen[str]] = []
        for (command, _), (kind, index) in zip(made, _TASKS, strict=True):
            config = {"cluster": _CLUSTER, "task": {"type": kind, "index": index}}
            words = ["-c", _SERVER, "server"] if kind == "ps" else ["program.py"]
            process = subprocess.Popen(
                [*command, "sh", "-c", _OWN_RAY_FOLDER, sys.executable, *words],
                env={**variables, "TF_CONFIG": json.dumps(config)},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                text=True,
            )
            processes.append(process)
        try:
            deadline_s = time.monotonic() + _LIMIT_S
            while any(process.poll() is None for process in processes):
                assert not any(process.poll() for process in processes)  # the others would wait
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            outputs = [process.communicate()[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    said = [json.loads(output.splitlines()[-1]) for output in outputs[:2]]
    assert [one[0] for one in said] == ["chief", "worker"]
    for _, losses, _ in said:
        assert losses[-1] < 0.2 * losses[0]
    assert said[0][2] == said[1][2]  # both have read what both have learned
    assert wait_for_end(descendants(os.getpid()) - before) == set()
