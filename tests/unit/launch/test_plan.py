"""Task plans, read back with the code that reads them in tasks."""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import sys
import typing
from pathlib import Path

import pytest

from stratagem import cluster
from stratagem.cluster import addresses
from stratagem.cluster.addresses import free_ports
from stratagem.cluster.processes import check_cluster
from stratagem.environment import num_forced_cpu_devices, size_cpu_thread_pool
from stratagem.launch.options import LaunchArguments, LaunchOptions
from stratagem.launch.plan import (
    LaunchFolders,
    assign_devices,
    make_launch_folders,
    plan_tasks,
    uses_gpus,
)
from stratagem.launch.prefork.warm_start import writes_environment

EVERYTHING = LaunchOptions(workers=2, chief=True, ps=2, evaluator=True)
JOBS = {
    "chief": ["127.0.0.1:2001"],
    "worker": ["127.0.0.1:2002", "127.0.0.1:2003"],
    "ps": ["127.0.0.1:2004", "127.0.0.1:2005"],
    "evaluator": ["127.0.0.1:2006"],
}


def planned(options, *, gpus=(), **more):
    ports = range(2001, 2001 + len(options.task_types))
    return plan_tasks(options, ["run"], ports=ports, gpus=gpus, base={}, **more)


@pytest.mark.parametrize("place", range(6))
def test_each_task_finds_the_cluster_and_itself(monkeypatch, place) -> None:
    plan = planned(EVERYTHING)[place]
    monkeypatch.setenv("TF_CONFIG", plan.variables["TF_CONFIG"])
    resolver = cluster.detect()
    assert resolver.cluster_spec() == JOBS
    task_type, index = [(job, i) for job, tasks in JOBS.items() for i in range(len(tasks))][place]
    assert (resolver.task_type, resolver.task_id) == (task_type, index)
    assert plan.name == f"{task_type} {index}"
    assert plan.file_name == f"{task_type}-{index}"
    assert plan.trains is (task_type in ("chief", "worker"))
    check_cluster(resolver.cluster_spec(), task_type, index)


def test_input_workers_are_a_task_outside_the_cluster(monkeypatch) -> None:
    options = LaunchOptions(workers=2, input_workers=3)
    *workers, service = planned(options, gpus=["0", "1"], restart=1)
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


def test_variables_of_tasks(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    options = LaunchOptions(ps=1, run_dir="runs", log_level="debug")
    folders = LaunchFolders(variables={"STRATAGEM_MEMORY_DIR": "/memory"}, losses="/losses")
    worker, ps = planned(options, gpus=["3"], restart=2, folders=folders)
    assert worker.command == ps.command == ("run",)
    for plan, seen in ((worker, "3"), (ps, "")):
        assert (
            plan.variables.items()
            >= {
                "CUDA_VISIBLE_DEVICES": seen,
                "STRATAGEM_RESTART_COUNT": "2",
                "PYTHONUNBUFFERED": "1",
                "STRATAGEM_RUN_DIR": str(tmp_path / "runs"),
                "STRATAGEM_LOG_LEVEL": "debug",
                "STRATAGEM_MEMORY_DIR": "/memory",
                "STRATAGEM_LOSS_FILE": f"/losses/{plan.file_name}.json",
            }.items()
        )
    (plain,) = planned(LaunchOptions())
    assert not [name for name in plain.variables if re.search("CACHE|_DIR|LEVEL|LOSS", name)]


# Devices assigned to each task.

ON_CPU = ""
WORKERS = ["worker"] * 2
ALL = ["chief", "worker", "ps", "ps", "evaluator"]


def gpus_of(task_types, *, each=None, gpus="", base=None) -> list[str | None]:
    """What CUDA_VISIBLE_DEVICES becomes, task by task; None where it is left alone."""
    names = gpus.split(",") if gpus else []
    dealt = assign_devices(task_types, devices_per_worker=each, gpus=names, base=base or {})
    for variables in dealt:
        # A task without a GPU is not to look for one, and every other may.
        assert ("JAX_PLATFORMS" in variables) == (variables.get("CUDA_VISIBLE_DEVICES") == ON_CPU)
    return [variables.get("CUDA_VISIBLE_DEVICES") for variables in dealt]


@pytest.mark.parametrize(
    ("task_types", "each", "gpus", "seen"),
    [
        (WORKERS, None, "0,1,2,3", ["0,1", "2,3"]),
        (WORKERS, None, "0,1,2", ["0", "1"]),
        (WORKERS, 1, "4,5,6", ["4", "5"]),
        (["worker"], None, "GPU-1f,GPU-2e", ["GPU-1f,GPU-2e"]),
        # Fewer GPUs than workers, and nothing asked for: all stays as it is.
        (WORKERS, None, "0", [None, None]),
        (WORKERS, None, "", [None, None]),
        (ALL, None, "0,1,2,3", ["0,1", "2,3", ON_CPU, ON_CPU, ON_CPU]),
        (ALL, None, "0,1,2,3,4", ["0,1", "2,3", ON_CPU, ON_CPU, "4"]),
        (ALL, 1, "0,1,2,3,4", ["0", "1", ON_CPU, ON_CPU, "2"]),
        (["chief", "ps", "evaluator"], 2, "7,8,9", ["7,8", ON_CPU, "9"]),
    ],
)
def test_gpus_are_dealt_out_in_order(task_types, each, gpus, seen) -> None:
    assert gpus_of(task_types, each=each, gpus=gpus) == seen


def test_too_few_gpus_are_counted_in_the_message() -> None:
    with pytest.raises(
        ValueError, match=r"2 workers with devices_per_worker=2 need 4 GPUs, but there are 3: 0,1,2"
    ):
        gpus_of([*WORKERS, "ps"], each=2, gpus="0,1,2")


@pytest.mark.parametrize(
    ("platforms", "expected"),
    [
        (None, True),
        ("", True),
        ("cuda", True),
        ("tpu,CUDA", True),
        ("gpu", True),
        ("cpu", False),
        ("tpu,cpu", False),
    ],
)
def test_gpus_are_used_where_jax_would_use_them(platforms, expected) -> None:
    base = {} if platforms is None else {"JAX_PLATFORMS": platforms}
    assert uses_gpus(base) is expected
    dealt = assign_devices(["worker"], devices_per_worker=2, gpus=["0", "1"], base=base)
    assert ("CUDA_VISIBLE_DEVICES" in dealt[0]) is expected
    assert ("XLA_FLAGS" in dealt[0]) is not expected


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        (None, ""),
        ("--xla_dump_to=here --xla_a=1", "--xla_dump_to=here --xla_a=1 "),
        ("--xla_force_host_platform_device_count=8 --xla_b", "--xla_b "),
    ],
)
def test_virtual_cpu_devices_are_those_that_the_library_counts(monkeypatch, flags, kept) -> None:
    base = {} if flags is None else {"XLA_FLAGS": flags, "JAX_NUM_CPU_DEVICES": "8"}
    worker, ps, evaluator = assign_devices(
        ["worker", "ps", "evaluator"], devices_per_worker=3, gpus=[], base=base
    )
    assert worker == evaluator
    assert ps == {}
    assert worker["XLA_FLAGS"] == f"{kept}--xla_force_host_platform_device_count=3"
    assert worker["JAX_NUM_CPU_DEVICES"] == "3"
    monkeypatch.setenv("XLA_FLAGS", worker["XLA_FLAGS"])
    assert num_forced_cpu_devices() == 3


@pytest.mark.parametrize(("num_devices", "chosen"), [(3, None), (3, "64"), (1, None)])
def test_thread_pool_is_sized_as_the_library_does(monkeypatch, num_devices, chosen) -> None:
    monkeypatch.setenv("NPROC", chosen or "")
    base = {"NPROC": chosen} if chosen else {}
    (worker,) = assign_devices(["worker"], devices_per_worker=num_devices, gpus=[], base=base)
    if chosen is None:
        monkeypatch.delenv("NPROC")
        size_cpu_thread_pool(num_devices)
    dealt = {**base, **worker}.get("NPROC")
    # One device needs no more threads than there are.
    assert dealt == (os.environ["NPROC"] if num_devices > 1 else None)


# Options of a launch and their errors.


def test_keyword_arguments_are_the_fields() -> None:
    fields = {field.name for field in dataclasses.fields(LaunchOptions)}
    assert fields == LaunchArguments.__optional_keys__
    hints = typing.get_type_hints(LaunchArguments)
    assert hints == typing.get_type_hints(LaunchOptions)


def test_those_that_lead_come_first() -> None:
    options = LaunchOptions(workers=2, chief=True, ps=1, evaluator=True)
    assert options.task_types == ("chief", "worker", "worker", "ps", "evaluator")
    assert LaunchOptions().task_types == ("worker",)
    assert LaunchOptions(workers=0, chief=True).task_types == ("chief",)


@pytest.mark.parametrize(
    ("error", "given", "words"),
    [
        *(
            (ValueError, *row)
            for row in (
                ({"workers": -1}, "workers=-1 is too small(?s:.)*at least 0"),
                ({"ps": -1}, "ps=-1 is too small"),
                ({"devices_per_worker": 0}, "devices_per_worker=0 is too small(?s:.)*at least 1"),
                ({"max_restarts": -2}, "max_restarts=-2 is too small"),
                ({"input_workers": -1}, "input_workers=-1 is too small"),
                ({"node_rank": -1}, "node_rank=-1 is too small"),
                ({"workers": 0}, "leaves no task to train"),
                ({"workers": 0, "ps": 3, "evaluator": True}, "leaves no task to train"),
                (
                    {"log_level": "loud"},
                    "log_level='loud' is not a log level(?s:.)*'debug', 'info'",
                ),
                ({"show": "none"}, "show='none' is not a valid choice(?s:.)*'all', 'leader'"),
                ({"grace_s": -0.5}, "grace_s=-0.5 is not a valid number of seconds"),
                ({"evaluator_grace_s": float("nan")}, "nan is not a valid number of seconds"),
                ({"survivors": True, "min_workers": 1}, "survivors=True was .* min_workers=1"),
                ({"workers": 2, "survivors": True, "ps": 1}, "survivors=True was .* ps=1"),
            )
        ),
        *(
            (TypeError, *row)
            for row in (
                ({"workers": True}, "workers=True is of type bool(?s:.)*a whole number"),
                ({"workers": None}, "workers=None is of type NoneType(?s:.)*a whole number"),
                ({"ps": "2"}, "ps='2' is of type str"),
                ({"devices_per_worker": 1.0}, "devices_per_worker=1.0 is of type float"),
                ({"chief": 1}, "chief=1 is of type int(?s:.)*True or False"),
                ({"evaluator": "yes"}, "evaluator='yes' is of type str"),
                ({"grace_s": "10"}, "grace_s='10' is of type str(?s:.)*a number of seconds"),
                ({"node_rank": "1"}, "node_rank='1' is of type str"),
                ({"nnodes": "2:4"}, "nnodes='2:4' is of type str(?s:.)*a whole number"),
                ({"coordinator": 29400}, "coordinator=29400 is of type int(?s:.)*HOST:PORT"),
                ({"log_dir": 3}, "log_dir=3 is of type int(?s:.)*a path, or None for no files"),
            )
        ),
    ],
)
def test_value_that_cannot_be_is_refused(error, given, words) -> None:
    with pytest.raises(error, match=words):
        LaunchOptions(**given)


# Free ports.


def test_ports_can_be_listened_on_and_differ() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", ""])
def test_port_in_use_on_any_address_is_not_chosen(monkeypatch, tmp_path, host) -> None:
    """As seen when it is the only one but one."""
    with socket.create_server((host, 0)) as server:
        taken = server.getsockname()[1]
        file = tmp_path / "range"
        file.write_text(f"{taken + 1}\t60999\n")
        monkeypatch.setattr(addresses, "_RANGE_FILE", file)
        monkeypatch.setattr(addresses, "_FIRST_PORT", taken)
        (other,) = free_ports(1)
        assert other != taken


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such file")
def test_outgoing_connections_take_none_of_the_ports() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first <= 20_000:
        pytest.skip(f"outgoing connections of this machine have ports from {first} on")
    assert max(free_ports(100)) < first


def test_a_port_that_may_not_be_used_is_an_error(monkeypatch) -> None:
    class Socket(socket.socket):
        def bind(self, address) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(PermissionError):
        free_ports(1)


# Scripts that set environment variables, recognized by their text.


_READS = (
    "",
    "import os",
    "import os\nprint(os.environ['HOME'])",
    "import os\nprint(os.environ.get('HOME'), *os.environ.items())",
    "import os\nprint('HOME' in os.environ, os.environ['A'] == os.getenv('B'))",
    "environment = {}\nenvironment['A'] = 'B'",
)
_WRITES = (
    "import os\nos.environ['A'] = 'B'",
    "import os\nos.environ['A'] += 'B'",
    "import os\ndel os.environ['A']",
    "import os\nos.environ.setdefault('A', 'B')",
    "import os\nos.environ.update(A='B')",
    "import os\nos.environ |= {'A': 'B'}",
    "import os\nfor os.environ['A'] in 'BC': pass",
    "import os\nvariables = os.environ\nvariables['A'] = 'B'",
    "import os\nchange(os.environ)",
    "import os\nos.putenv('A', 'B')",
    "from os import unsetenv",
    "from os import environ as variables\nvariables['A'] = 'B'",
    "import os\ngetattr(os, 'environ')['A'] = 'B'",
    "from os import environ\nprint(environ)",
)


@pytest.mark.parametrize("text", [*_READS, *_WRITES])
def test_script_that_may_set_a_variable(text) -> None:
    assert writes_environment(text) is (text in _WRITES)


# Folders for programs and memory: gone with the launcher, or with the next one.


@pytest.fixture
def bases(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Instead of the temporary folder and of /dev/shm."""
    files, memory = tmp_path / "files", tmp_path / "memory"
    for folder in (files, memory):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(files))
    monkeypatch.setattr("stratagem.launch.plan._MEMORY", str(memory))
    return files, memory


def test_folders_exist_during_a_launch_and_those_of_restarts_with_restarts_only(bases) -> None:
    with make_launch_folders(LaunchOptions(max_restarts=1), {}) as made:
        programs, *_, memory = made.variables.values()
        assert [Path(programs).parent, Path(memory).parent] == [*bases]
        Path(programs, "program").touch()
    with make_launch_folders(LaunchOptions(), {}) as made:
        assert made.variables == {}
        assert Path(str(made.losses)).parent == bases[0]
    base = {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    with make_launch_folders(LaunchOptions(max_restarts=1), base) as made:
        assert list(made.variables) == ["STRATAGEM_MEMORY_DIR"]
    assert [list(base.iterdir()) for base in bases] == [[], []]


def test_folders_of_a_killed_launcher_are_removed_by_the_next(bases) -> None:
    left = [
        base / f"stratagem-{kind}-x"
        for base, kind in ((bases[0], "losses"), (bases[0], "programs"), (bases[1], "memory"))
    ]
    for folder in left:
        folder.mkdir()
        (folder / "owner.lock").touch()  # free, as after the death of its owner
    with make_launch_folders(LaunchOptions(max_restarts=1), {}):
        assert not any(folder.exists() for folder in left)
