"""Templates, and Slurm scripts: the cluster that each worker detects from srun's variables."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.cli.manifests.rendering import Template, render_slurm
from stratagem.group.authentication.secret import Secret
from tests.unit.launch.waiting import until

_BASH = shutil.which("bash") or "bash"

# Tells which task it is, in one write: the tasks share one output.
_WORKER = """
import json, os, sys
from stratagem.cluster import detect
resolver = detect()
spec = resolver.cluster_spec()
processes = resolver.processes()
told = {
    "task": [resolver.task_type, resolver.task_id],
    "process": [processes.process_id, processes.num_processes],
    "hosts": [address.rpartition(":")[0] for address in spec.as_dict()["worker"]],
    "coordinator_is_first": processes.coordinator_address == spec.task_address("worker", 0),
    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "arguments": sys.argv[1:],
    "secret": os.environ["STRATAGEM_SECRET"],
}
os.write(1, (json.dumps(told) + "\\n").encode())
sys.exit(int(os.environ.get("EXIT_CODES", "0,0,0").split(",")[resolver.task_id]))
"""

# Starts the tasks node by node, as srun with --distribution=block; ends with the highest code.
_SRUN = """
import itertools, os, subprocess, sys
options = list(itertools.takewhile(lambda word: word.startswith("--"), sys.argv[1:]))
command = sys.argv[1 + len(options) :]
assert "--distribution=block" in options, options
counts = [int(n) for n in os.environ["TASKS_OF_NODES"].split(",")]
common = {
    "SLURM_STEP_NUM_TASKS": str(sum(counts)),
    "SLURM_STEP_NODELIST": f"node[1-{len(counts)}]",
    "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
}
rank, codes = 0, []
for node, count in enumerate(counts, 1):
    for _ in range(count):
        own = {"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"node{node}"}
        codes.append(subprocess.run(command, env={**os.environ, **common, **own}).returncode)
        rank += 1
sys.exit(max(codes))
"""


class _Run:
    """A script as sbatch would start it, with a `srun` and a `scontrol` of our own."""

    def __init__(self, folder: Path, **variables: str) -> None:
        self.folder = folder
        self.variables = variables
        self.requeued: list[str] = []
        self.exit_code = -1

    def __call__(self, script: str) -> list[dict[str, object]]:
        (self.folder / "my worker.py").write_text(_WORKER)
        self.program("srun", f"#!{sys.executable}\n{_SRUN}")
        self.program("scontrol", f'#!{_BASH}\necho "$@" >> {self.folder}/scontrol.txt\n')
        checked = subprocess.run([_BASH, "-n"], input=script, text=True, capture_output=True)
        assert (checked.returncode, checked.stderr) == (0, "")
        told = dict(re.findall(r"^#SBATCH --([-a-z]+)=(.*)$", script, re.MULTILINE))
        counts = _block(int(told["ntasks"]), int(told["nodes"]), int(told["ntasks-per-node"]))
        environment = {
            name: text for name, text in os.environ.items() if not name.startswith("SLURM")
        }
        for name in ("TF_CONFIG", "STRATAGEM_SECRET", "STRATAGEM_SECRET_FILE"):
            environment.pop(name, None)
        environment |= {
            "PATH": f"{self.folder}:{environment['PATH']}",
            "SLURM_JOB_ID": "4711",
            "TASKS_OF_NODES": ",".join(map(str, counts)),
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(int(told.get("gpus-per-node", 0))))),
            **self.variables,
        }
        finished = subprocess.run(
            [_BASH],
            input=script,
            text=True,
            capture_output=True,
            cwd=self.folder,
            env=environment,
            timeout=120,
        )
        self.exit_code = finished.returncode
        assert finished.stderr == ""
        requeued = self.folder / "scontrol.txt"
        self.requeued = requeued.read_text().splitlines() if requeued.exists() else []
        return [json.loads(line) for line in finished.stdout.splitlines()]

    def program(self, name: str, text: str) -> None:
        path = self.folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _srun_line(script: str) -> str:
    (line,) = (line for line in script.splitlines() if line.startswith("srun "))
    return line


def _block(tasks: int, nodes: int, most: int) -> list[int]:
    counts = [min(most, tasks - most * node) for node in range(nodes)]
    assert all(count > 0 for count in counts), "a node without a task"
    assert sum(counts) == tasks, "a task without a node"
    return counts


def _render(**overrides: object) -> str:
    given = {"python": sys.executable, "script": "my worker.py", **overrides}
    nodes = given.pop("nodes", None)
    return render_slurm(given, nodes=nodes if isinstance(nodes, int) else None)


def _directive(script: str, name: str) -> str | None:
    found = re.findall(rf"^#SBATCH --{name}=(.*)$", script, re.MULTILINE)
    return found[0] if found else None


def test_every_worker_finds_its_place_and_its_gpus(tmp_path) -> None:
    words = ["--text", "a b", "it's", '{"a": "$HOME"}', "*", "; exit 3", "gr\u00fc\u00df"]
    run = _Run(tmp_path)
    told = run(
        _render(worker_replicas=3, tasks_per_node=2, num_gpus_per_worker=2, cmdline_args=words)
    )
    assert [worker["task"] for worker in told] == [["worker", rank] for rank in range(3)]
    assert [worker["process"] for worker in told] == [[rank, 3] for rank in range(3)]
    assert [worker["gpus"] for worker in told] == ["0,1", "2,3", "0,1"]
    for worker in told:
        assert worker["hosts"] == ["node1", "node1", "node2"]
        assert worker["coordinator_is_first"] is True
        assert worker["arguments"] == words
    assert len({worker["secret"] for worker in told}) == 1
    Secret(str(told[0]["secret"]))
    assert (run.exit_code, run.requeued) == (0, [])


@pytest.mark.parametrize(
    ("codes", "exit_code", "requeued"),
    [("42,42", 42, ["requeue 4711"]), ("1,1", 1, []), ("0,0", 0, []), ("42,137", 137, [])],
)
def test_job_that_saved_before_it_stopped_runs_again(tmp_path, codes, exit_code, requeued) -> None:
    run = _Run(tmp_path, EXIT_CODES=codes, STRATAGEM_SECRET="s" * 32)
    assert [worker["secret"] for worker in run(_render())] == ["s" * 32] * 2
    assert (run.exit_code, run.requeued) == (exit_code, requeued)


def test_directives_match_the_request() -> None:
    script = _render(
        name="digits",
        worker_replicas=8,
        tasks_per_node=4,
        num_gpus_per_worker=2,
        cpus_per_worker=6,
        partition="gpu,long",
        time="1-12:00:00",
        grace_period_s=300,
        array="0-7%2",
    )
    assert script.startswith("#!/bin/bash\n#SBATCH --job-name=digits\n")
    for name, text in {
        "nodes": "2",
        "ntasks": "8",
        "ntasks-per-node": "4",
        "gpus-per-node": "8",
        "cpus-per-task": "6",
        "partition": "gpu,long",
        "time": "1-12:00:00",
        "signal": "TERM@300",
        "open-mode": "append",
        "array": "0-7%2",
    }.items():
        assert _directive(script, name) == text
    assert "#SBATCH --requeue\n" in script
    assert "--cpus-per-task=6" in _srun_line(script)
    # Slurm reads directives down to the first command only.
    assert script.rindex("#SBATCH") < script.index("\nsrun")


def test_what_was_not_asked_for_is_left_to_the_site() -> None:
    script = _render(num_gpus_per_worker=0)
    for name in ("gpus-per-node", "cpus-per-task", "partition", "time"):
        assert _directive(script, name) is None
    assert "cpus-per-task" not in script


@pytest.mark.parametrize(
    ("overrides", "nodes", "tasks", "on_a_node"),
    [
        ({"nodes": 3}, "3", "3", "1"),
        ({"nodes": 3, "tasks_per_node": 4}, "3", "12", "4"),
        ({"nodes": 2, "worker_replicas": 5}, "2", "5", "3"),
        ({"nodes": 2, "worker_replicas": 5, "tasks_per_node": "4"}, "2", "5", "4"),
        ({"worker_replicas": "5", "tasks_per_node": 2}, "3", "5", "2"),
        ({"worker_replicas": 1, "tasks_per_node": 8}, "1", "1", "1"),
        ({"nodes": 4, "ps_replicas": 1}, "4", "4", "1"),
        ({"nodes": 2, "ps_replicas": 2, "worker_replicas": 3}, "2", "6", "3"),
    ],
)
def test_nodes_and_workers_follow_from_each_other(overrides, nodes, tasks, on_a_node) -> None:
    script = _render(**overrides)
    assert _directive(script, "nodes") == nodes
    assert _directive(script, "ntasks") == tasks
    assert _directive(script, "ntasks-per-node") == on_a_node


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"nodes": 0}, r"nodes=0(?s:.)*at least one node"),
        (
            {"nodes": 3, "worker_replicas": 2, "tasks_per_node": 1},
            r"2 workers at 1 per node need 2 nodes, but 3 were requested",
        ),
        ({"nodes": 3, "worker_replicas": 2}, "as many nodes as the tasks need"),
        ({"nodes": 3, "ps_replicas": 2}, "worker_replicas=0 is not valid"),
        (
            {"nodes": 2, "ps_replicas": 1, "worker_replicas": 1, "tasks_per_node": 1},
            "1 workers and 2 tasks of servers at 1 per node need 3 nodes",
        ),
        ({"ps_replicas": -1}, "at least 0"),
        ({"heterogeneous": 2}, "True or False"),
        ({"array": "1", "heterogeneous": True}, "Slurm has no arrays of heterogeneous jobs"),
        ({"worker_replicas": 0}, "worker_replicas=0 is not valid"),
        ({"name": "a\n#SBATCH --account=x"}, "one word"),
        ({"partition": "a b"}, "one word"),
        ({"time": "2 hours"}, "one word"),
        ({"python": ""}, "the path of a file"),
        ({"has_eval": True}, "slurm.sh.jinja has no variable 'has_eval'"),
    ],
)
def test_value_that_cannot_work_is_named(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        _render(**overrides)


# Stands in for Python: tells its task and arguments. Task 0 trains until it gets a notice.
_INTERPRETER = """#!/bin/bash
if [ "$1" = -c ]; then exec python3 "$@"; fi
echo "$SLURM_PROCID $STRATAGEM_SLURM_JOBS $*"
if [ "$SLURM_PROCID" = 0 ]; then
    trap 'echo saved; exit 42' TERM
    touch trains
    while :; do sleep 0.05; done
fi
"""


def _with_servers(**overrides: object) -> str:
    return _render(ps_replicas=1, worker_replicas=2, num_gpus_per_worker=2, **overrides)


def test_coordinator_alone_gets_the_notice_and_the_job_runs_again(tmp_path) -> None:
    run = _Run(tmp_path)
    run.program("my python", _INTERPRETER)
    run.program("srun", f"#!{sys.executable}\n{_SRUN}")
    run.program("scontrol", f'#!{_BASH}\necho "$@"\n')
    (tmp_path / "job.sh").write_text(_with_servers(python=str(tmp_path / "my python"), array="0-3"))
    variables = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "TMPDIR": str(tmp_path),
        "TASKS_OF_NODES": "2,2",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "3",
    }
    with subprocess.Popen(
        (_BASH, "job.sh"), cwd=tmp_path, env=variables, text=True, stdout=subprocess.PIPE
    ) as script:
        until(lambda: (tmp_path / "trains").exists() or script.poll() is not None)
        script.send_signal(signal.SIGTERM)
        printed = script.communicate(timeout=60)[0].splitlines()
    assert printed == [
        "0 chief=1,ps=1,worker=2 -u my worker.py",
        "saved",
        *(f"{rank} chief=1,ps=1,worker=2 -m stratagem server" for rank in (1, 2, 3)),
        "requeue 7_3",
    ]
    assert script.returncode == 42
    assert not [*tmp_path.glob("tmp.*")]


def test_heterogeneous_job_has_gpus_for_its_workers_only() -> None:
    script = _with_servers(heterogeneous=True, tasks_per_node=2, partition="gpu", time="90")
    servers, workers = script.split("#SBATCH hetjob\n")
    for component, tasks, gpus in ((servers, "2", None), (workers, "2", "4")):
        assert _directive(component, "ntasks") == tasks
        assert _directive(component, "gpus-per-node") == gpus
        assert _directive(component, "partition") == "gpu"
        assert _directive(component, "time") == "90"
        assert _directive(component, "signal") == "B:TERM@120"
        assert "#SBATCH --requeue\n" in component
    assert "--het-group=0,1" in _srun_line(script)
    assert "#SBATCH hetjob" not in _with_servers()
    assert _directive(_with_servers(), "ntasks") == "4"


def test_template_of_an_earlier_version_is_rendered() -> None:
    # Without servers, arrays and heterogeneous jobs.
    head = "{% set worker_replicas = 2 -%}{% set tasks_per_node = 1 -%}"
    assert render_slurm({}, f"{head}#SBATCH --ntasks={{{{ worker_replicas }}}}", nodes=3).endswith(
        "=3"
    )


# Templates: variables, overrides and errors.

_TEMPLATE = """{# a comment #}
{%- set name = "example" -%}
{%- set replicas = 2 -%}
{% set big = False %}
{% set share = 0.5 %}
{% set title = name ~ "!" %}
{% set words = ["a", "b"] %}
{% macro shown() %}
{{ name }} {{ replicas + 1 }} {{ big }} {{ title }} {{ words | join("+") }}
{% endmacro %}
{% set late = 1 %}
{{ shown() }}
"""


def test_variables_are_the_lines_at_the_top() -> None:
    assert Template(_TEMPLATE).variables == {
        "name": "example",
        "replicas": 2,
        "big": False,
        "share": 0.5,
        "title": "example!",
        "words": ["a", "b"],
    }


@pytest.mark.parametrize(
    ("overrides", "shown"),
    [
        ({}, "example 3 False example! a+b"),
        ({"replicas": " -7 ", "big": "Yes"}, "example -6 True example! a+b"),
        ({"name": "7", "title": "t"}, "7 3 False t a+b"),
        ({"name": "x"}, "x 3 False x! a+b"),
        ({"words": "c 'd e'"}, "example 3 False example! c+d e"),
        ({"words": ["f"], "big": True}, "example 3 True example! f"),
        ({"name": "{{ 1 }}", "title": "{% raw %}"}, "{{ 1 }} 3 False {% raw %} a+b"),
    ],
)
def test_string_is_converted_to_the_type_in_the_template(overrides, shown) -> None:
    assert Template(_TEMPLATE).render(overrides).strip() == shown


def test_unknown_variables_are_all_named_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"no variable 'a', 'b'(?s:.)*big, name, replicas, share"):
        Template(_TEMPLATE).values({"b": 1, "a": 1, "name": "x"})


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"replicas": "2.5"}, r"replicas='2.5' has a different type than 2(?s:.)*an integer"),
        ({"replicas": "+-2"}, "pass a value of that type for replicas"),
        ({"big": "2"}, r"big='2' has a different type than False(?s:.)*true or false"),
        ({"words": "it's"}, r"cannot be split into words(?s:.)*quotes in pairs"),
    ],
)
def test_string_of_another_type_is_named(overrides, message) -> None:
    with pytest.raises(ValueError, match=message):
        Template(_TEMPLATE).render(overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% set a = %}", "mine, line 1: "),
        ("ok\n{% if %}", "mine, line 2: "),
        (
            "{% set a = b %}",
            r"mine: variable 'a' is set from an undefined variable(?s:.)*set above it",
        ),
        ("{{ missing }}", "mine: 'missing' is undefined"),
        ("{{ 1 / 0 }}", "mine: division by zero"),
        ("{{ 'a' + 1 }}", "mine: can only concatenate"),
        ("{{ ''.__class__.__mro__ }}", "mine: access to attribute '__class__'"),
        ("{{ 'a \"' | shell_words }}", "mine: 'a \"' cannot be split into words"),
        ("{% include 'other' %}", "mine: "),
        ("{{ range(1000000) | list }}", "mine: Range too big"),
    ],
)
def test_wrong_template_is_named(text, message) -> None:
    with pytest.raises(ValueError, match=message):
        Template(text, "mine").render()


def test_value_too_long_for_a_process_is_refused() -> None:
    template = Template('{% set value = "" %}{{ value | variable("NAME") }}')
    fits = "x" * (128 * 1024 - len("NAME=") - 1)
    assert template.render({"value": fits}) == fits
    with pytest.raises(
        ValueError,
        match=r"The environment variable NAME would be 131073 bytes long(?s:.)*at most 131072",
    ):
        template.render({"value": f"{fits}x"})
