"""Task plans, read back with the code that reads them in tasks."""

from __future__ import annotations

import json

import pytest

from stratagem import cluster
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.task_plan import RestartFolders, plan_own_tasks, plan_tasks

EVERYTHING = LaunchOptions(workers=2, chief=True, ps=2, evaluator=True)
JOBS = {
    "chief": ["127.0.0.1:2001"],
    "worker": ["127.0.0.1:2002", "127.0.0.1:2003"],
    "ps": ["127.0.0.1:2004", "127.0.0.1:2005"],
    "evaluator": ["127.0.0.1:2006"],
}


def planned(options, *, base=None, gpus=(), restart=0):
    ports = range(2001, 2001 + len(options.task_types))
    return plan_tasks(options, ["run"], ports=ports, gpus=gpus, base=base or {}, restart=restart)


@pytest.mark.parametrize("place", range(6))
def test_each_task_finds_the_cluster_and_itself(monkeypatch, place) -> None:
    plan = planned(EVERYTHING)[place]
    monkeypatch.setenv("TF_CONFIG", plan.variables["TF_CONFIG"])
    resolver = cluster.detect()
    assert resolver is not None
    assert resolver.cluster_spec() == JOBS
    task_type, index = [(job, i) for job, tasks in JOBS.items() for i in range(len(tasks))][place]
    assert (resolver.task_type, resolver.task_id) == (task_type, index)
    assert plan.name == f"{task_type} {index}"
    assert plan.file_name == f"{task_type}-{index}"
    assert plan.trains is (task_type in ("chief", "worker"))
    cluster.check_cluster(resolver.cluster_spec(), task_type, index)


@pytest.mark.parametrize(("workers", "chief"), [(1, False), (4, False), (3, True)])
def test_first_task_leads_and_all_train_together(monkeypatch, workers, chief) -> None:
    plans = planned(LaunchOptions(workers=workers, chief=chief))
    for process_id, plan in enumerate(plans):
        monkeypatch.setenv("TF_CONFIG", plan.variables["TF_CONFIG"])
        resolver = cluster.TFConfigClusterResolver()
        processes = resolver.processes()
        assert processes.process_id == process_id
        assert processes.num_processes == workers + chief
        assert processes.coordinator_address == "127.0.0.1:2001"
        leads = cluster.is_chief(resolver.cluster_spec(), plan.task_type, plan.index)
        assert leads is (process_id == 0)


def test_input_workers_are_a_task_outside_the_cluster(monkeypatch) -> None:
    options = LaunchOptions(workers=2, input_workers=3)
    *workers, service = plan_tasks(
        options, ["run"], ports=[2001, 2002, 2003], gpus=["0", "1"], base={}, restart=1
    )
    assert [plan.variables for plan in workers] == [
        {**plan.variables, "STRATAGEM_INPUT_SERVICE": "127.0.0.1:2003"}
        for plan in planned(LaunchOptions(workers=2), gpus=["0", "1"], restart=1)
    ]
    assert (service.name, service.trains, service.serves) == ("input 0", False, True)
    assert service.command[1:] == (
        *("-m", "stratagem", "input-service"),
        *("--workers", "3", "--host", "127.0.0.1", "--port", "2003"),
    )
    hidden = {"TF_CONFIG": "", "CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    assert service.variables.items() >= {**hidden, "STRATAGEM_RESTART_COUNT": "1"}.items()


@pytest.mark.parametrize(
    ("index", "place"),
    [(0, ("--host", "10.0.0.1", "--port", "5050")), (1, ("--host", "::2", "--dispatcher"))],
)
def test_input_workers_of_other_machines_join_the_first_ones(index, place) -> None:
    services = ["10.0.0.1:5050", "[::2]:7"]
    cluster = {"worker": ["10.0.0.1:1", "[::2]:1"], "input": services}
    worker, service = plan_own_tasks(
        [("worker", index), ("input", index)],
        LaunchOptions(input_workers=4),
        ["run"],
        cluster=cluster,
        gpus=(),
        base={},
        restart=0,
        folders=RestartFolders(),
    )
    assert json.loads(worker.variables["TF_CONFIG"])["cluster"] == {"worker": cluster["worker"]}
    assert worker.command == ("run",)
    assert worker.variables["STRATAGEM_INPUT_SERVICE"] == services[0]
    assert service.command[3:] == ("input-service", "--workers", "4", *place, *services[:index])
    assert service.variables["TF_CONFIG"] == ""


def test_folder_for_events_is_reported_as_one_that_stays(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    for plan in planned(LaunchOptions(workers=2, run_dir="runs")):
        assert plan.variables["STRATAGEM_RUN_DIR"] == str(tmp_path / "runs")
    for plan in planned(LaunchOptions(workers=2)):
        assert "STRATAGEM_RUN_DIR" not in plan.variables


def test_compiled_programs_are_kept_where_there_is_a_folder_for_them() -> None:
    options = LaunchOptions(workers=2)
    plans = plan_tasks(
        options,
        ["x"],
        ports=[1, 2],
        gpus=(),
        base={},
        folders=RestartFolders(programs="/cache", memory="/memory"),
    )
    for plan in plans:
        assert plan.variables["JAX_COMPILATION_CACHE_DIR"] == "/cache"
        assert plan.variables["STRATAGEM_PROGRAM_DIR"] == "/cache"
        assert plan.variables["STRATAGEM_MEMORY_DIR"] == "/memory"
        assert plan.variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert not [
        name
        for plan in planned(options)
        for name in plan.variables
        if "CACHE" in name or "MEMORY" in name
    ]


def test_devices_and_the_number_of_the_start_are_in_the_environment() -> None:
    worker, ps = planned(LaunchOptions(ps=1), gpus=["3"], restart=2)
    assert worker.command == ps.command == ("run",)
    for plan, seen in ((worker, "3"), (ps, "")):
        assert plan.variables["CUDA_VISIBLE_DEVICES"] == seen
        assert plan.variables["STRATAGEM_RESTART_COUNT"] == "2"
        assert plan.variables["PYTHONUNBUFFERED"] == "1"


def test_log_level_is_in_the_environment_if_it_was_asked_for() -> None:
    (worker,) = planned(LaunchOptions(log_level="debug"))
    assert worker.variables["STRATAGEM_LOG_LEVEL"] == "debug"
    (worker,) = planned(LaunchOptions())
    assert "STRATAGEM_LOG_LEVEL" not in worker.variables


def test_too_few_gpus_are_found_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="need 2 GPUs, but there are 1"):
        planned(LaunchOptions(devices_per_worker=2), gpus=["0"])
