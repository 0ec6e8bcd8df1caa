"""Restarted tasks: real processes, from first line to end."""

from __future__ import annotations

import dataclasses
import errno
import re
import sys
from pathlib import Path

import pytest

import stratagem as sg
from stratagem.errors import NOT_NEEDED
from stratagem.group.verdict import Loss
from stratagem.launch.options import LaunchOptions
from stratagem.launch.restart import policy, task_group
from stratagem.launch.restart.launcher import Outcome, launch, notice_after_s, workers_after
from stratagem.launch.restart.policy import (
    SETTLE_S,
    RestartCount,
    TaskState,
    cause_of_failure,
    have_saved_and_left,
    tasks_to_kill,
    tasks_to_stop,
)
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.observe.events import FailureEvent, NoticeEvent, RestartEvent, read_run
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


def test_killed_tasks_leave_no_temporary_folder(script, folder, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(folder / "tmp"))
    (folder / "tmp").mkdir()
    path = script(
        f"""{AFTER}{SELF}
from stratagem.resources import TemporaryFolder
Path(name).write_text(str(TemporaryFolder("stratagem-test-").path))
os.kill(os.getpid(), 9)
"""
    )
    with pytest.raises(RuntimeError, match="SIGKILL"):
        sg.launch.run(path, workers=1)
    assert Path((folder / "worker-0").read_text()).parent == folder / "tmp"
    assert [*(folder / "tmp").iterdir()] == []


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


def test_tasks_share_a_token_of_ray_that_is_stored_nowhere(script, folder, monkeypatch) -> None:
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


def test_tasks_that_saved_and_left_start_again_at_no_charge(capfd, script, monkeypatch) -> None:
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
    assert "Starting worker 1 again: restart 1 of 4." in err
    assert sorted(one.name for one in folder.glob("worker-*")) == [
        "worker-0-0",
        "worker-1-0",
        "worker-1-1",
        "worker-2-0",
    ]
    # It has the address of the one before.
    assert (folder / "worker-1-0").read_text() == (folder / "worker-1-1").read_text()


def refuse_starts(monkeypatch, restarts: set[str]) -> None:
    """The system has no more processes for worker 1 at these restarts."""
    start = task_group._start_new

    def start_or_fail(plan, base):
        if plan.name == "worker 1" and plan.variables["STRATAGEM_RESTART_COUNT"] in restarts:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(plan, base)

    monkeypatch.setattr(task_group, "_start_new", start_or_fail)


def test_worker_that_cannot_start_again_is_lost_again(monkeypatch, capfd, script, folder) -> None:
    refuse_starts(monkeypatch, {"1"})
    path = script(
        f"""{AFTER}{SELF}
attempt = os.environ["STRATAGEM_RESTART_COUNT"]
Path(f"{{name}}-{{attempt}}").write_text("")
if task["index"] == 1:
    raise SystemExit(3 if attempt == "0" else 0)
while not Path("worker-1-2").exists():
    time.sleep(0.01)
"""
    )
    sg.launch.run(path, workers=2, max_restarts=4, survivors=True)
    err = capfd.readouterr().err
    assert "worker 1 could not start again: Resource temporarily unavailable." in err
    assert re.findall(r"restart . of .", err) == ["restart 1 of 4", "restart 2 of 4"]
    found = sorted(one.name for one in folder.glob("worker-*"))
    assert found == ["worker-0-0", "worker-1-0", "worker-1-2"]


def test_worker_that_never_starts_again_ends_no_survivor(monkeypatch, capfd, script) -> None:
    refuse_starts(monkeypatch, {"1"})
    path = script(
        f"""{AFTER}{SELF}
if task["index"] == 1:
    raise SystemExit(3)
time.sleep(2)
print("done")
"""
    )
    sg.launch.run(path, workers=2, max_restarts=1, survivors=True)
    out, err = capfd.readouterr()
    assert out == "[worker 0] done\n"
    assert "Not starting worker 1 again: no restart of 1 is left." in err


@pytest.mark.parametrize(("refused", "code"), [({"1"}, 0), ({"1", "2"}, 1)])
def test_restart_that_cannot_start_is_a_failure(monkeypatch, capfd, script, refused, code) -> None:
    refuse_starts(monkeypatch, refused)
    path = script('raise SystemExit(3 if os.environ["STRATAGEM_RESTART_COUNT"] == "0" else 0)')
    outcome = launch([sys.executable, path], LaunchOptions(workers=2, max_restarts=2))
    assert outcome.exit_code == code
    err = capfd.readouterr().err
    assert "worker 1 failed first: it could not start: Resource temporarily unavailable." in err
    assert re.findall(r"restart . of .", err) == ["restart 1 of 2", "restart 2 of 2"]


def test_a_worker_that_is_not_needed_is_no_failure(capfd, script) -> None:
    """All others have ended before it could join them."""
    path = script(f"{AFTER}{SELF}raise SystemExit({NOT_NEEDED} if task['index'] else 0)\n")
    sg.launch.run(path, workers=3, survivors=True, max_restarts=4)
    err = capfd.readouterr().err
    assert "failed" not in err
    assert "again" not in err


_LOSING = """
import time
from stratagem.group import verdict
from stratagem.group.current import Identity
from stratagem.group.member import Group

verdict.explain = lambda what, **rest: "The group has come to its end."
host, port = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"][0].split(":")
labels = ("worker 0 (a:1)", "worker 1 (b:1)")
group = Group(Identity(task["index"], labels, host, int(port)), verdict.GroupLimits())
if task["index"] == 1:
    group.report_error("OSError: [Errno 28] No space left on device")
    time.sleep(1000)
group.exchange("place", None)
"""


def test_lost_task_is_named_whatever_the_words_of_the_error(script, folder, capfd) -> None:
    outcome = launch([sys.executable, script(_LOSING)], LaunchOptions(workers=2, run_dir="run"))
    assert outcome.exit_code == 1
    assert capfd.readouterr().err.splitlines()[-5:] == [
        "[launch] worker 1 failed first: it ended with an error, as worker 0 reported (exit code"
        " 1).",
        "[launch] Last lines of worker 0:",
        "[launch]     stratagem.errors.UnavailableError: The group has come to its end.",
        "[launch]     This is worker 0 (a:1), at 'place' before any shared program.",
        "[launch] Stopped: worker 1 (killed by SIGTERM).",
    ]
    (launcher,) = [one for one in read_run("run").processes if one.task == "launcher 0"]
    (failure,) = [event for event in launcher.events if isinstance(event, FailureEvent)]
    assert (failure.lost, failure.step, failure.reported_by) == ("worker 1", 0, "worker 0")


# Decisions about running tasks: a table of states.

LOST = ("stratagem.errors.UnavailableError: worker 1 is gone.",)
LOSS = Loss(
    task="worker 1",
    how="ended with an error",
    step=0,
    reported_by="a",
    message="worker 1 (a:1) ended with an error in your code:",
)
NOW_S = 100.0


def end(name, returncode=0, at_s=NOW_S, lines=(), **more) -> ExitStatus:
    return ExitStatus(name=name, returncode=returncode, at_s=at_s, lines=lines, **more)


def state(task_type="worker", returncode=None, *, ago_s=0.0, lines=(), **more) -> TaskState:
    """A task that runs, or that ended a while ago and of which nothing is left."""
    trains = task_type in ("chief", "worker")
    if returncode is None:
        return TaskState(task_type=task_type, trains=trains, **more)
    ended = end(task_type, returncode, NOW_S - ago_s, lines)
    return TaskState(task_type=task_type, trains=trains, status=ended, **{"is_gone": True, **more})


@pytest.mark.parametrize(
    ("statuses", "cause"),
    [
        ([], None),
        ([end("a"), end("b")], None),
        ([end("a", 1, 3.0), end("b", 2, 2.0)], "b"),
        # Whoever lost a peer noticed it: it did not begin it, however early it was seen.
        ([end("a", 1, 1.0, LOST), end("b", 1, 2.0)], "b"),
        ([end("a", 1, 1.0, LOST), end("b", -9, 2.0)], "b"),
        ([end("a", 1, 2.0, LOST), end("b", 1, 1.0, LOST), end("c")], "b"),
        # JAX's client aborts when another task has gone.
        ([end("a", -6, 1.0, ("another task died",)), end("b", 1, 2.0)], "b"),
        # Seen at the same moment.
        ([end("a", 1, 1.0), end("b", -11, 1.0)], "b"),
        ([end("a", -9, 1.0), end("b", 1, 1.0)], "a"),
        # Stopped tasks are none, unless a signal ended them that was not sent.
        ([end("a", 1, 1.0, LOST), end("b", 1, 2.0, was_stopped=True)], "a"),
        (
            [end("a", 1, 1.0, LOST), end("b", -11, 9.0, was_stopped=True, signals=frozenset({15}))],
            "b",
        ),
        # An error that quotes the one of another task is no failure of its own, and the other task
        # failed even if it was told to end while it did.
        ([end("a", 1, 1.0, loss=LOSS), end("worker 1", 1, 2.0)], "worker 1"),
        ([end("a", 1, 1.0, loss=LOSS), end("worker 1", 1, 2.0, was_stopped=True)], "worker 1"),
        ([end("a", 1, 1.0, loss=LOSS), end("worker 2", 1, 2.0, was_stopped=True)], "a"),
        # Whoever saved and left has not failed, if another one has.
        ([end("a", 42, 1.0), end("b", 1, 2.0)], "b"),
        ([end("a", 1, 1.0, LOST), end("b", 42, 2.0)], "b"),
    ],
)
def test_cause_is_the_first_that_failed_by_itself(statuses, cause) -> None:
    found = cause_of_failure(statuses)
    assert (found and found.name) == cause


@pytest.mark.parametrize(
    ("statuses", "left"),
    [
        ([], False),
        ([end("a")], False),
        ([end("a", 42), end("b", 42)], True),
        ([end("a", 42), end("b", 42, lines=LOST)], True),
        ([end("a", 42), end("b", 1, lines=LOST), end("c")], True),
        ([end("a", 42), end("b", -15, was_stopped=True, signals=frozenset({15}))], True),
        ([end("a", 42), end("b", 1)], False),
        ([end("a", 42), end("b", -9)], False),
        ([end("a", 1, lines=LOST)], False),
    ],
)
def test_tasks_have_saved_and_left_if_none_failed_otherwise(statuses, left) -> None:
    assert have_saved_and_left(statuses) is left


@pytest.mark.parametrize(
    ("states", "stopped"),
    [
        ([state(), state()], []),
        ([state(returncode=0), state()], []),
        ([state(returncode=0), state(), state("ps"), state("evaluator")], []),
        # A failure ends all.
        ([state(returncode=1), state(), state("ps"), state("evaluator")], [1, 2, 3]),
        ([state(), state("ps", returncode=-9)], [0]),
        ([state(), state("evaluator", returncode=1)], [0]),
        # A server may leave when it likes, if it leaves well.
        ([state(), state("ps", returncode=0)], []),
        # Who lost a peer waits for the peer, but not for ever.
        ([state(returncode=1, lines=LOST), state()], []),
        ([state(returncode=1, lines=LOST, ago_s=SETTLE_S), state()], [1]),
        ([state(returncode=1, lines=LOST), state(returncode=-9), state()], [2]),
        # Who saved and left gives the others time to do the same.
        ([state(returncode=42), state()], []),
        ([state(returncode=42, ago_s=SETTLE_S), state()], [1]),
        ([state(returncode=42), state(returncode=1), state()], [2]),
        # The work is done: servers go at once, the evaluator has its time.
        ([state(returncode=0), state("ps"), state("evaluator")], [1]),
        ([state(returncode=0), state("input"), state("evaluator")], [1]),
        ([state(returncode=0, ago_s=60), state("ps"), state("evaluator")], [1, 2]),
        ([state(returncode=0, ago_s=60), state(returncode=0, ago_s=59), state("evaluator")], []),
        ([state("chief", 0, ago_s=60), state(), state("evaluator")], []),
        # What a task has left running goes with it, whatever the others do.
        ([state(returncode=0, is_gone=False), state()], [0]),
        # Nobody is told twice.
        ([state(returncode=1), state(stopped_at_s=99.0), state()], [2]),
        ([state(returncode=0, is_gone=False, stopped_at_s=99.0), state()], []),
    ],
)
def test_tasks_are_stopped_when_they_are_to_be(states, stopped) -> None:
    assert tasks_to_stop(states, NOW_S, evaluator_grace_s=60.0) == stopped


@pytest.mark.parametrize(
    ("states", "stopped"),
    [
        ([state(returncode=-9), state()], []),
        ([state(returncode=-9), state(returncode=1), state()], []),
        # The work is done once one has ended well; no worker is left if none has.
        ([state(returncode=-9), state(returncode=0), state("evaluator")], []),
        ([state(returncode=-9, ago_s=60), state(returncode=0, ago_s=60), state("evaluator")], [2]),
        ([state(returncode=-9), state(returncode=1), state("evaluator")], [2]),
        # Only workers have others to take their place.
        ([state(), state("evaluator", returncode=1)], [0]),
        ([state(returncode=-9), state(), state("ps", returncode=1)], [1]),
    ],
)
def test_workers_survive_others(states, stopped) -> None:
    assert tasks_to_stop(states, NOW_S, evaluator_grace_s=60.0, may_survive=True) == stopped


@pytest.mark.parametrize(
    ("states", "killed"),
    [
        ([state(), state(stopped_at_s=NOW_S - 9.9)], []),
        ([state(), state(stopped_at_s=NOW_S - 10)], [1]),
        ([state(returncode=0, is_gone=False, stopped_at_s=80.0)], [0]),
        ([state(returncode=0, stopped_at_s=80.0)], []),
    ],
)
def test_tasks_that_do_not_end_are_killed(states, killed) -> None:
    assert tasks_to_kill(states, NOW_S, grace_s=10.0) == killed


# Numbers of workers after a restart: a table of exit statuses, and real processes.

FEWER = LaunchOptions(workers=4, min_workers=2, max_restarts=9)
MORE = LaunchOptions(workers=4, min_workers=2, max_workers=6, max_restarts=9)
STOPPED = end("worker 0", -15, was_stopped=True, signals=frozenset({15}))


@pytest.mark.parametrize(
    ("options", "num_workers", "statuses", "after"),
    [
        (LaunchOptions(workers=4), 4, [end("worker 1", -9)], 4),
        (FEWER, 4, [end("worker 1", -9), STOPPED], 3),
        (FEWER, 4, [end("worker 0", -9), end("worker 1", 1, lines=LOST)], 3),
        (FEWER, 4, [end("worker 1", -9), end("worker 2", -9), STOPPED], 2),
        (FEWER, 3, [end(f"worker {i}", -9) for i in range(3)], 2),
        (FEWER, 2, [end("worker 1", -9)], 2),
        # What fails beside the workers takes none away.
        (FEWER, 3, [end("ps 0", -9), STOPPED], 3),
        (FEWER, 3, [end("chief 0", 1), STOPPED], 3),
        # All are there after a notice.
        (FEWER, 2, [end("worker 0", 42), end("worker 1", 42)], 4),
        (FEWER, 2, [STOPPED], 4),
        (MORE, 4, [end("worker 0", 42)], 6),
        (MORE, 6, [end("worker 0", -9)], 5),
        # Nobody is to be missed where there is no least number.
        (LaunchOptions(workers=2, max_workers=3), 3, [end("worker 0", -9)], 3),
    ],
)
def test_next_number_of_workers(options, num_workers, statuses, after) -> None:
    assert workers_after(options, num_workers, statuses) == after


def test_notice_is_given_while_some_are_missing() -> None:
    assert notice_after_s(FEWER, 4) is None
    assert notice_after_s(FEWER, 3) == 60.0
    assert notice_after_s(MORE, 4) == 60.0
    assert notice_after_s(MORE, 6) is None


def test_tasks_that_were_asked_to_leave_are_started_again_at_no_charge() -> None:
    statuses = [end("worker 0", 42, was_stopped=True), STOPPED]
    before = RestartCount(failures=1, short_starts=2)
    after = before.next(statuses, ran_s=0.0, max_restarts=1, were_asked=True)
    assert after == RestartCount(failures=1, notices=1)
    # Unless they were done, or one failed by itself.
    done = [end("worker 0", was_stopped=True), dataclasses.replace(STOPPED, name="ps 0")]
    assert before.next(done, ran_s=0.0, max_restarts=1, were_asked=True) is None
    failed = [*statuses, end("worker 1", -9, was_stopped=True, signals=frozenset({15}))]
    assert before.next(failed, ran_s=0.0, max_restarts=1, were_asked=True) is None


def test_preemptions_have_a_budget_of_their_own() -> None:
    left, failed = [end("worker 0", 42), STOPPED], [end("worker 0", 1), STOPPED]
    limits = {"ran_s": 60.0, "max_restarts": 1, "max_preemptions": 2}
    count = RestartCount()
    for statuses in (left, failed, left):
        count = count.next(statuses, **limits)
        assert count is not None
    assert count == RestartCount(failures=1, notices=2, preemptions=2)
    assert count.next(left, **limits) is None
    assert count.next(failed, **limits) is None
    # That the launcher asked is no preemption.
    asked = count.next([end("worker 0", 42, was_stopped=True), STOPPED], **limits, were_asked=True)
    assert asked == RestartCount(failures=1, notices=3, preemptions=2)
    unlimited = {"ran_s": 60.0, "max_restarts": 0}
    assert RestartCount(preemptions=1000).next(left, **unlimited) is not None


def test_job_whose_preemptions_are_used_up_ends_with_their_code(capfd, script) -> None:
    path = script("raise SystemExit(42)")
    options = LaunchOptions(max_restarts=5, max_preemptions=1)
    assert launch([sys.executable, path], options).exit_code == 42
    err = capfd.readouterr().err
    assert err.count("Starting all tasks again: preemption 1 of 1.") == 1
    assert err.count("Starting all tasks again") == 1
    assert err.endswith("[launch] No restart after a preemption is left, of 1.\n")


def test_launcher_that_ends_when_tasks_left_says_so() -> None:
    asked = {"was_stopped": True, "signals": frozenset({15})}
    statuses = (end("ps 0", -15, **asked), end("worker 0", 42, **asked))
    assert Outcome(statuses=statuses, signum=None, were_asked=True).exit_code == 42
    assert Outcome(statuses=statuses, signum=None).exit_code == 0


@pytest.mark.parametrize("given", [(3, 2, None), (1, 2, 1), (3, 2, 4)])
def test_numbers_that_do_not_fit_together_are_refused(given) -> None:
    least, workers, most = given
    with pytest.raises(ValueError, match=r"min_workers=\d, workers=\d .* contradict each other"):
        LaunchOptions(workers=workers, min_workers=least, max_workers=most)


def test_training_goes_on_with_fewer_and_takes_the_others_in_again(script, folder, capfd) -> None:
    """Worker 0 dies; the one that is left is asked to leave, with a save and its code."""
    path = script(
        f"""{AFTER}
import signal
attempt = int(os.environ["STRATAGEM_RESTART_COUNT"])
count = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
def leave(signum, frame):
    Path("saved").touch()
    raise SystemExit(42)
signal.signal(signal.SIGTERM, leave)
sys.stdout.write(f"attempt {{attempt}} of {{count}}\\n")
if attempt == 0:
    say_pid(f"ready-{{task['index']}}")
    while not (Path("ready-0").exists() and Path("ready-1").exists()):
        time.sleep(0.01)
    if task["index"] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
if attempt < 2:
    {WAIT}
"""
    )
    options = {"workers": 2, "min_workers": 1, "max_restarts": 1, "rejoin_after_s": 0.5}
    sg.launch.run(path, run_dir="run", **options)
    out, err = capfd.readouterr()
    assert sorted(line.partition("] ")[2] for line in out.splitlines()) == [
        *["attempt 0 of 2"] * 2,
        "attempt 1 of 1",
        *["attempt 2 of 2"] * 2,
    ]
    assert (folder / "saved").exists()
    assert "[launch] There are 1 of 2 workers now.\n" in err
    assert "Asking the tasks to save and leave, so that all workers can start." in err
    assert "[launch] There are 2 of 2 workers now.\n" in err
    (launcher,) = read_run(folder / "run").processes
    notices = [event.reason for event in launcher.events if isinstance(event, NoticeEvent)]
    causes = [event.cause for event in launcher.events if isinstance(event, RestartEvent)]
    assert notices == ["all workers are to start again"]
    assert causes == ["worker 0 failed (killed by SIGKILL)", "all workers start again"]


def test_function_gives_the_values_of_all_workers_that_were_there_last(tmp_path) -> None:
    values = sg.launch.spawn(_fail_once, (str(tmp_path),), workers=2, min_workers=1, max_restarts=1)
    assert values == [1]


def _fail_once(folder: str) -> int:
    """In worker 1 of two; worker 0 waits to be stopped."""
    import json
    import os
    import time

    config = json.loads(os.environ["TF_CONFIG"])
    if len(config["cluster"]["worker"]) == 1:
        return 1
    if config["task"]["index"] == 1:
        raise ValueError(folder)
    time.sleep(1000)
    return 0


# Quick restarts give bit-identical training, with real workers.

PROGRAM = """
import hashlib, os, signal, sys, time

loaded = "jax" in sys.modules

import stratagem as sg
import jax
import keras
import numpy as np

if len(sys.argv) > 1:  # once more, with programs that another process has compiled
    jax.config.update("jax_enable_compilation_cache", False)
strategy = sg.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(3)
with strategy.scope():
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
    model = keras.Sequential([keras.layers.Input((8,)), *layers])
    model.compile("adam", "mse", metrics=["mae"])
rng = np.random.default_rng(0)
x, y = rng.random((60, 8), "float32"), rng.random((60, 3), "float32")
model.fit(x, y, batch_size=7, epochs=2, verbose=0)
weights = b"".join(np.asarray(value).tobytes() for value in model.get_weights())
index = strategy.cluster_resolver.task_id
print(index, loaded, hashlib.sha256(weights).hexdigest(), flush=True)
if len(sys.argv) == 1 and os.environ["STRATAGEM_RESTART_COUNT"] == "0":
    if index == 1:
        signal.raise_signal(signal.SIGKILL)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux only")
def test_forked_workers_with_kept_programs_have_the_same_weights(folder, capfd) -> None:
    (folder / "train.py").write_text(PROGRAM)
    options = LaunchOptions(workers=2, max_restarts=1, devices_per_worker=1)
    assert launch([sys.executable, "train.py"], options).exit_code == 0
    assert launch([sys.executable, "train.py", "anew"], LaunchOptions(workers=2)).exit_code == 0
    lines = [line.split()[2:] for line in capfd.readouterr().out.splitlines() if "Gloo" not in line]
    assert sorted((index, loaded) for index, loaded, _ in lines) == sorted(
        (index, loaded) for index in "01" for loaded in ("False", "True", "True")
    )
    assert len({digest for _, _, digest in lines}) == 1
