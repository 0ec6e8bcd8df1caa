"""Restarted tasks: real processes, from first line to end."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.errors import NOT_NEEDED
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.restart import policy
from stratagem.launch.restart.launcher import launch
from tests.unit.launch.test_scripts import AFTER, SELF, WAIT


def test_all_are_started_again_until_they_succeed(capfd, script, folder) -> None:
    path = script(
        f"""{AFTER}{SELF}
attempt = int(os.environ["STRATAGEM_RESTART_COUNT"])
print("attempt", attempt)
cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
Path(f"{{name}}-{{attempt}}").write_text(f"{{cluster}}\\n")
other = Path(f"worker-0-{{attempt}}")
while not (other.exists() and other.read_text().endswith("\\n")):
    time.sleep(0.01)
raise SystemExit(attempt < 2 and task["index"] == 1)
"""
    )
    sg.launch.run(path, workers=2, max_restarts=3, log_dir=folder / "logs")
    err = capfd.readouterr().err
    assert re.findall(r"restart . of .", err) == ["restart 1 of 3", "restart 2 of 3"]
    clusters = [(folder / f"worker-{i}-{a}").read_text() for a in range(3) for i in range(2)]
    # The same for all tasks of a start, and new ports at each.
    assert clusters[0::2] == clusters[1::2]
    assert len(set(clusters)) == 3
    log = "attempt 0\n=== restart 1 ===\nattempt 1\n=== restart 2 ===\nattempt 2\n"
    assert (folder / "logs" / "worker-1.log").read_text() == log


def test_tasks_of_a_launch_share_a_secret_that_other_launches_do_not_have(script, folder) -> None:
    path = script(
        f"""{AFTER}{SELF}
attempt = os.environ["STRATAGEM_RESTART_COUNT"]
Path(f"{{name}}-{{attempt}}").write_text(os.environ["STRATAGEM_SECRET"])
raise SystemExit(attempt == "0" and task["index"] == 1)
"""
    )
    secrets: list[str] = []
    for _ in range(2):
        sg.launch.run(path, workers=2, max_restarts=1)
        found = {(folder / f"worker-{index}-1").read_text() for index in range(2)}
        found.add((folder / "worker-1-0").read_text())
        secrets += found
    assert len(set(secrets)) == len(secrets) == 2
    assert all(len(secret) == 64 for secret in secrets)


def test_tasks_of_a_cluster_share_a_token_of_ray_that_is_stored_nowhere(
    script, folder, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    write = 'Path(name).write_text(os.environ.get("RAY_AUTH_TOKEN", "none"))\n'
    path = script(f'{AFTER}{SELF}{write}if task["type"] == "ps":\n    {WAIT}')
    tokens: list[str] = []
    for _ in range(2):
        sg.launch.run(path, chief=True, workers=1, ps=1, evaluator=True)
        tasks = ("chief-0", "worker-0", "evaluator-0")
        tokens += {(folder / task).read_text() for task in tasks}
    assert len(set(tokens)) == len(tokens) == 2
    assert all(len(token) == 64 for token in tokens)
    assert not (folder / "home").exists()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    sg.launch.run(script(f"{AFTER}{SELF}{write}"), workers=2)
    assert (folder / "worker-1").read_text() == "mine"


def test_secret_of_the_user_is_handed_on(script, folder, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_SECRET", "s" * 32)
    sg.launch.run(script(f'{AFTER}{SELF}Path(name).write_text(os.environ["STRATAGEM_SECRET"])'))
    assert (folder / "worker-0").read_text() == "s" * 32


def test_after_the_last_restart_the_failure_is_raised(capfd, script) -> None:
    path = script('raise SystemExit(10 + int(os.environ["STRATAGEM_RESTART_COUNT"]))')
    with pytest.raises(RuntimeError, match="worker 0 failed first of 1 tasks: exit code 11"):
        sg.launch.run(path, max_restarts=1)
    assert capfd.readouterr().err.count("failed first: exit code 1") == 2


def test_tasks_that_saved_and_left_are_started_again_at_no_charge(
    capfd, script, monkeypatch
) -> None:
    """Worker 1 alone gets notice; worker 0 loses it, or is stopped where it does not notice."""
    monkeypatch.setattr(policy, "SETTLE_S", 0.0)
    path = script(
        f"""
        attempt = int(os.environ["STRATAGEM_RESTART_COUNT"])
        if attempt == 0 and task["index"] == 1:
            raise SystemExit(42)
        if attempt == 0:
            {WAIT}
        print("goes on")
        """
    )
    sg.launch.run(path, workers=2, max_restarts=0)
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[worker {i}] goes on" for i in range(2)]
    assert "worker 1 saved and left after notice (exit code 42): stopping the others." in err
    assert "[launch] Starting all tasks again; this does not count as a failure.\n" in err
    assert "failed" not in err.replace("no failure", "")


def test_tasks_that_leave_at_once_for_ever_fail(capfd, script) -> None:
    with pytest.raises(RuntimeError, match="worker 0 failed first of 1 tasks: exit code 42"):
        sg.launch.run(script("raise SystemExit(42)"))
    err = capfd.readouterr().err
    assert err.count("this does not count as a failure") == 2
    assert err.count("times or more in a row, so it counts as a failure.") == 1


@pytest.mark.parametrize(
    ("options", "variables", "kept"),
    [
        ({"max_restarts": 1}, {}, True),
        ({}, {}, False),
        ({"max_restarts": 1}, {"JAX_ENABLE_COMPILATION_CACHE": "0"}, False),
        ({"max_restarts": 1}, {"JAX_COMPILATION_CACHE_DIR": "own"}, False),
    ],
)
def test_folder_for_compiled_programs_lives_as_long_as_the_launch(
    capfd, script, monkeypatch, options, variables, kept
) -> None:
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    path = script(
        """
        folder = os.environ.get("STRATAGEM_PROGRAM_DIR")
        print(folder is not None and os.path.isdir(folder) and folder)
        raise SystemExit(os.environ["STRATAGEM_RESTART_COUNT"] == "0")
        """
    )
    launch([sys.executable, path], LaunchOptions(**options))
    printed = {line.removeprefix("[worker 0] ") for line in capfd.readouterr().out.splitlines()}
    (folder,) = printed  # the same for both starts
    assert (folder != "False") is kept
    assert not Path(folder).exists()


def test_a_lost_worker_starts_again_while_the_others_run(capfd, script, folder) -> None:
    path = script(
        f"""{AFTER}{SELF}
attempt = os.environ["STRATAGEM_RESTART_COUNT"]
Path(f"{{name}}-{{attempt}}").write_text(os.environ["TF_CONFIG"])
if task["index"] == 1:
    raise SystemExit(3 if attempt == "0" else 0)
while not Path("worker-1-1").exists():
    time.sleep(0.01)
"""
    )
    sg.launch.run(path, workers=3, max_restarts=4, survivors=True)
    err = capfd.readouterr().err
    assert "worker 1 failed: exit code 3. 2 continue." in err
    assert "Starting worker 1 again after 1 s: restart 1 of 4." in err
    assert sorted(one.name for one in folder.glob("worker-*")) == [
        "worker-0-0",
        "worker-1-0",
        "worker-1-1",
        "worker-2-0",
    ]
    # It has the address of the one before.
    assert (folder / "worker-1-0").read_text() == (folder / "worker-1-1").read_text()


def test_spares_are_further_workers_and_need_not_be_used(capfd, script, folder) -> None:
    path = script(
        f"""{AFTER}{SELF}
number = int(os.environ["STRATAGEM_NUM_SPARES"])
workers = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
Path(name).write_text(f"{{workers - number}}")
raise SystemExit({NOT_NEEDED} if task["index"] >= workers - number else 0)
"""
    )
    sg.launch.run(path, workers=2, spares=1, max_restarts=4)
    assert [(folder / f"worker-{index}").read_text() for index in range(3)] == ["2"] * 3
    err = capfd.readouterr().err
    assert "failed" not in err
    assert "again" not in err
