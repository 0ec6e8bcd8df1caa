"""Programs on servers of other machines, and what a cluster has to be before it starts."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import ray

import stratagem as sg
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import DeadlineExceededError
from stratagem.launch.remote.ray_cluster import ServerRegistry
from stratagem.parameter_server import clusters as placing
from stratagem.parameter_server.cluster_plan import (
    checked_cluster,
    checked_options,
)
from stratagem.parameter_server.clusters import Placing, SharedCluster
from stratagem.parameter_server.coordinator.coordinated_workers import WorkerLink
from tests.multiprocess.namespaces import can_make_hosts, hosts
from tests.unit.launch.remote.living import descendants, wait_for_end
from tests.unit.parameter_server.clusters import coordinated, local_strategy
from tests.unit.parameter_server.shared_with_workers import LIMIT_S, forget, note, seen, times_seen

_LIMIT_S = 150.0
# Machines do not share it; `ip netns exec` has a view of its own of what is mounted.
_OWN_RAY_FOLDER = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$0" "$@"'
_SERVER = "from stratagem.cli import main; main()"


def run_on_machines(
    program: str, cluster: Mapping[str, Sequence[str]], network: str, folder: Path
) -> list[str]:
    """What each task of a cluster prints; all end well and leave no process.

    All but servers run the program; `network` has the first three numbers of the addresses.
    """
    (folder / "program.py").write_text(program)
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[4] / "src"),
        "JAX_PLATFORMS": "cpu",
        "STRATAGEM_SECRET": "0123456789abcdef" * 4,
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    }
    before = descendants(os.getpid())
    tasks = [
        (kind, index) for kind, addresses in cluster.items() for index in range(len(addresses))
    ]
    outputs = [folder / f"{kind} {index}" for kind, index in tasks]  # a pipe, unread, would fill
    with hosts(len(tasks), network) as made:
        processes: list[subprocess.Popen[bytes]] = []
        for (command, _), (kind, index), output in zip(made, tasks, outputs, strict=True):
            config = {"cluster": cluster, "task": {"type": kind, "index": index}}
            words = ["-c", _SERVER, "server"] if kind == "ps" else ["program.py"]
            with output.open("w") as file:
                process = subprocess.Popen(
                    [*command, "sh", "-c", _OWN_RAY_FOLDER, sys.executable, *words],
                    env={**variables, "TF_CONFIG": json.dumps(config)},
                    cwd=folder,
                    stdout=file,
                )
            processes.append(process)
        try:
            deadline_s = time.monotonic() + _LIMIT_S
            while any(process.poll() is None for process in processes):
                assert not any(process.poll() for process in processes)  # the others would wait
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    said = [output.read_text() for output in outputs]
    assert [process.returncode for process in processes] == [0] * len(tasks), said
    assert wait_for_end(descendants(os.getpid()) - before) == set()
    return said


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


_HYBRID_PROGRAM = """
import json
import stratagem as sg
import keras
import numpy as np

x = np.random.default_rng(0).integers(0, 9000, (64, 2))
y = np.random.default_rng(1).normal(size=(64, 1)).astype("float32")
losses = []
for place in ("server", "mirrored"):
    with sg.HybridStrategy(placement={"table": place}) as strategy:
        keras.utils.set_random_seed(1)  # Ray draws numbers, too
        with strategy.scope():
            table = keras.layers.Embedding(9000, 8, name="table")
            head = [keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((2,), dtype="int32"), table, *head])
            model.compile("adagrad", "mse")
        told = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        losses.append(told.history["loss"])
print(json.dumps(losses), flush=True)
"""


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


def test_leader_that_does_not_come_or_has_gone(monkeypatch) -> None:
    def none(name: object, *arguments: object, **options: object) -> None:
        raise ValueError(name)  # as Ray, where nobody has made an actor

    def late(*arguments: object) -> None:
        raise ray.exceptions.GetTimeoutError(str(arguments))

    worker = member(("worker", 0), types.SimpleNamespace(get_actor=none, exceptions=ray.exceptions))
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.3")
    words = r"The leader, \('chief', 0\), did not publish the servers' addresses within 0.3 s"
    with pytest.raises(DeadlineExceededError, match=words):
        worker._found()
    worker._asked = late
    assert worker._announced_address(0) is None
    with pytest.raises(RuntimeError, match="created in a worker that runs its own program"):
        worker.start_workers()


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


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces can be made here")
def test_chief_trains_with_servers_of_other_machines(tmp_path) -> None:
    cluster = {"chief": [f"{_NETWORK}.1:2222"], "ps": [f"{_NETWORK}.{i}:2222" for i in (2, 3)]}
    outputs = run_on_machines(_HYBRID_PROGRAM, cluster, _NETWORK, tmp_path)
    served, mirrored = json.loads(outputs[0].splitlines()[-1])
    np.testing.assert_allclose(served, mirrored, rtol=1e-5)


# Limits as values: each of them changes what happens.


@pytest.mark.parametrize(
    ("error", "given"),
    [
        (ValueError, {"start_delay_s": -1}),
        (TypeError, {"start_delay_s": "1"}),
        (ValueError, {"recovery_timeout_s": 0}),
        (ValueError, {"max_transient_failures": -1}),
        (TypeError, {"max_transient_failures": 1.5}),
        (ValueError, {"journal_interval_s": float("nan")}),
        (TypeError, {"journal_interval_s": True}),
    ],
    ids=str,
)
def test_number_that_makes_no_sense_is_refused(error: Any, given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    with pytest.raises(error, match=r"sg\.coordinator\.options received") as caught:
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


# Clusters that a strategy with parameter servers refuses before anything starts.

_JOBS: dict[str, list[str]] = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}


def _simple(jobs: dict[str, Any], task: tuple[str, int]) -> ClusterResolver:
    return sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec(jobs), task_type=task[0], task_id=task[1]
    )


@pytest.mark.parametrize(
    ("jobs", "task", "message"),
    [
        ({**_JOBS, "some_name": ["d:1"]}, ("chief", 0), r"has unknown jobs \['some_name'\]"),
        ({**_JOBS, "chief": ["a:1", "a:2", "a:3"]}, ("chief", 1), "has 3 tasks in job 'chief'"),
        ({**_JOBS, "evaluator": ["d:1", "e:1"]}, ("chief", 0), "has 2 tasks in job 'evaluator'"),
        (_JOBS, ("foobar", 0), "Task type 'foobar' is unknown"),
        (_JOBS, ("worker", 1), "Task id 1 of 'worker' is not in the cluster"),
        ({**_JOBS, "worker": []}, ("ps", 0), "has 1 ps and 0 worker tasks"),
        ({**_JOBS, "ps": []}, ("worker", 0), "has 0 ps and 1 worker tasks"),
        ({**_JOBS, "ps": ["b:1"]}, ("chief", 0), "have the same address 'b:1'"),
        ({**_JOBS, "ps": ["c"]}, ("chief", 0), "not of the form host:port"),
    ],
)
def test_clusters_that_cannot_be_are_refused_at_once(jobs, task, message) -> None:
    with pytest.raises(ValueError, match=message):
        sg.ParameterServerStrategy(_simple(jobs, task))


def test_clusters_of_a_union_and_of_the_environment_are_refused_likewise(monkeypatch) -> None:
    jobs, message = {**_JOBS, "evaluator": ["d:1", "e:1"]}, "has 2 tasks in job 'evaluator'"
    union = sg.cluster_resolver.UnionResolver(_simple(jobs, ("chief", 0)))
    with pytest.raises(ValueError, match=message):
        sg.ParameterServerStrategy(union)
    for cluster, task, words in ((jobs, "chief", message), (_JOBS, "worker", "worker")):
        config = {"cluster": cluster, "task": {"type": task, "index": int(task == "worker")}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        with pytest.raises(ValueError, match=words):
            sg.ParameterServerStrategy()


_EMPTY = sg.cluster_resolver.SimpleClusterResolver(sg.ClusterSpec({}))


@pytest.mark.parametrize(
    ("strategy", "resolver"),
    [
        ("ParameterServerStrategy", _EMPTY),
        ("ParameterServerStrategy", sg.cluster_resolver.TFConfigClusterResolver()),
        ("HybridStrategy", sg.cluster_resolver.UnionResolver(_EMPTY)),
    ],
)
def test_a_resolver_with_an_empty_cluster_is_refused(strategy, resolver) -> None:
    options = {"placement": {"embedding": "server"}} if strategy == "HybridStrategy" else {}
    with pytest.raises(ValueError, match=f"of {strategy} has an empty cluster"):
        getattr(sg, strategy)(cluster_resolver=resolver, **options)


def test_a_chief_needs_no_index_and_no_resolver_is_this_machine() -> None:
    resolver = sg.cluster_resolver.SimpleClusterResolver(sg.ClusterSpec(_JOBS), task_type="chief")
    assert checked_cluster(resolver, "a test")[1] == _JOBS
    assert not checked_cluster(None, "a test")[1]


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("task", ["chief", "ps"])
@pytest.mark.parametrize(("name", "job"), [("num_workers", "worker"), ("num_servers", "ps")])
def test_numbers_are_for_no_cluster(independent, task, name, job) -> None:
    options: dict[str, Any] = {name: 2}
    with pytest.raises(ValueError, match=f"{name}=2 was passed for a cluster with 1 {job} tasks"):
        sg.ParameterServerStrategy(_simple(_JOBS, (task, 0)), independent=independent, **options)


# What servers and workers ask of their machines.

SPEC = ClusterSpec({"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1", "d:1"]})


def _with(
    monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], num_machines: int = 2
) -> None:
    nodes = [{"Alive": True}] * num_machines + [{"Alive": False}]
    ray = types.SimpleNamespace(cluster_resources=lambda: resources, nodes=lambda: nodes)
    monkeypatch.setattr(placing, "load_ray", lambda: ray)


@pytest.mark.parametrize(
    ("spec", "is_own", "resources", "wanted"),
    [
        (SPEC, False, {"CPU": 8.0, "chief:0": 1.0}, ({"ps:1": 1}, {"worker:1": 1})),  # of tasks
        (SPEC, False, {"CPU": 16.0, "GPU": 5.0}, ({"CPU": 1}, {"GPU": 2, "CPU": 1})),  # shares
        (None, False, {"CPU": 2.0}, (None, None)),  # too small for these
        (
            None,
            False,
            {"CPU": 16.0, "GPU": 4.0, "ps": 2.0, "worker": 2.0},
            ({"ps": 1}, {"GPU": 2, "worker": 1}),
        ),
        (None, True, {"CPU": 16.0}, (None, None)),  # spread by Ray
    ],
)
def test_servers_and_workers_ask_for_resources(
    monkeypatch, spec, is_own, resources, wanted
) -> None:
    _with(monkeypatch, resources)
    found = Placing.now(spec, is_own=is_own)
    for kind, last in zip(("ps", "worker"), wanted, strict=True):
        got = found.resources(kind, 2)
        assert (got and got[-1]) == last


@pytest.fixture
def six_cores(monkeypatch) -> None:
    for name in ("NPROC", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("stratagem.parameter_server.clusters.available_cores", lambda: 6.0)


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.usefixtures("six_cores")
def test_processes_on_one_machine_share_its_cores(monkeypatch, is_own) -> None:
    _with(monkeypatch, {"CPU": 6.0}, num_machines=1)
    found = Placing.now(None, is_own=is_own)
    given = [found.threads(count) for count in (1, 2, 4, 8)]
    assert given == [{"NPROC": "6"}, {"NPROC": "3"}, {"NPROC": "1"}, {"NPROC": "1"}]


@pytest.mark.parametrize(
    ("spec", "num_machines", "variables"),
    [
        (None, 2, {}),
        (SPEC, 1, {}),
        (None, 1, {"NPROC": "5"}),
        (None, 1, {"JAX_NUM_CPU_DEVICES": "2"}),
        (None, 1, {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}),
    ],
)
@pytest.mark.usefixtures("six_cores")
def test_threads_are_left_alone_where_others_have_a_say(
    monkeypatch, spec, num_machines, variables
) -> None:
    _with(monkeypatch, {"CPU": 6.0}, num_machines)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Placing.now(spec, is_own=not spec).threads(2) == {}


# A strategy whose variables are on servers: how its steps run.


def test_steps_that_run_op_by_op_are_refused() -> None:
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            v = sg.Variable(np.zeros(2, "float32"))

        def function(is_eager: bool) -> None:
            sg.config.run_eagerly(is_eager)
            try:
                sg.get_strategy().run(lambda: v.assign_add(jnp.ones(2)))
            finally:
                sg.config.run_eagerly(False)

        coordinator.schedule(function, args=(True,))
        with pytest.raises(
            RuntimeError, match="Cannot run a step of a ParameterServerStrategy op by op"
        ):
            coordinator.join()
        coordinator.schedule(function, args=(False,)).fetch()
        assert np.asarray(v.value).tolist() == [1, 1]
