"""Numbers of workers after a restart: a table of exit statuses, and real processes."""

from __future__ import annotations

import dataclasses

import pytest

import stratagem as sg
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.restart.launcher import Outcome, notice_after_s, workers_after
from stratagem.launch.restart.restart_count import RestartCount
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.observe.run_events.reader import read_run
from stratagem.observe.run_events.records import NoticeEvent, RestartEvent
from tests.unit.launch.test_scripts import AFTER, WAIT

LOST = ("stratagem.errors.UnavailableError: worker 1 is gone.",)
FEWER = LaunchOptions(workers=4, min_workers=2, max_restarts=9)
MORE = LaunchOptions(workers=4, min_workers=2, max_workers=6, max_restarts=9)


def end(name: str, returncode: int = 0, **more) -> ExitStatus:
    return ExitStatus(name=name, returncode=returncode, at_s=1.0, **more)


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


def test_launcher_that_ends_when_tasks_left_says_so() -> None:
    asked = {"was_stopped": True, "signals": frozenset({15})}
    statuses = (end("ps 0", -15, **asked), end("worker 0", 42, **asked))
    assert Outcome(statuses=statuses, signum=None, restart=1, were_asked=True).exit_code == 42
    assert Outcome(statuses=statuses, signum=None, restart=1).exit_code == 0


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


def test_tasks_that_do_not_heed_the_notice_start_again_too(script, capfd) -> None:
    """From their last checkpoint, which may be long ago."""
    path = script(
        f"""
        count = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
        if count == 1:
            {WAIT}
        sys.stdout.write(f"all of {{count}}\\n")
        """
    )
    sg.launch.run(path, workers=1, max_workers=2, rejoin_after_s=0.0)
    assert sorted(capfd.readouterr().out.splitlines()) == [
        f"[worker {index}] all of 2" for index in range(2)
    ]


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
