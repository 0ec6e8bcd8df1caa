"""Slow tasks of a launch: reports and evictions."""

from __future__ import annotations

import re

import pytest

from stratagem.launch import functions as scripts
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.restart import slow_tasks
from stratagem.launch.restart.slow_tasks import followed_tasks
from stratagem.observe.run_events.reader import read_run
from stratagem.observe.run_events.records import StragglerEvent, encode
from stratagem.observe.stragglers.windows import WINDOW_S
from tests.unit.observe.goodput.runs import first_step, process, run, write
from tests.unit.observe.stragglers.simulation import Group

RUNNING = ("worker 0", "worker 1", "worker 2")


class Run:
    """A run folder to which workers write, and a launcher that follows it."""

    def __init__(self, folder, **options) -> None:
        followed = followed_tasks(LaunchOptions(workers=3, run_dir=folder, **options))
        assert followed is not None
        self.slow = followed
        self.slow.begin(0.0)
        write(folder, run(*(process(task, 0, first_step(1, 1)) for task in RUNNING)))
        self._folder, self._step = folder / "events", 1
        self.now_s = 0.0

    def train(self, **group) -> list:
        """Trains for a little longer than a window; returns what was found."""
        num_steps = group.pop("num_steps", 60)
        for task, _, event in Group(num_workers=3, num_steps=num_steps, **group).lines():
            later = {name: getattr(event, name) for name in event.__dataclass_fields__}
            later |= {"step": event.step + self._step, "monotonic_s": self.now_s + event.step}
            (path,) = self._folder.glob(f"{task.replace(' ', '-')}.*")
            with path.open("a") as file:
                file.write(f"{encode(type(event)(**later))}\n")
        self._step += num_steps
        self.now_s += WINDOW_S + 1
        return self.slow.find(self.now_s, RUNNING)


SLOW = {"slow": 1, "cause": "input", "extra_s": 0.5}
EVICTING = {"evict_slow": 1.6, "survivors": True}


def test_equal_tasks_are_not_reported(tmp_path) -> None:
    one = Run(tmp_path)
    assert [one.train(seed=seed) for seed in range(4)] == [[]] * 4


def test_slow_task_is_reported_once_and_again_after_it_recovered(tmp_path) -> None:
    one = Run(tmp_path)
    found = [one.train(**SLOW) for _ in range(4)]
    assert [len(each) for each in found] == [0, 1, 0, 0]
    assert found[1][0].text.startswith("worker 1 is slow in input: the others wait ")
    assert found[1][0].reason == ""
    assert one.train() == []
    assert [len(one.train(**SLOW)) for _ in range(3)] == [0, 1, 0]


def test_task_that_stays_slow_is_ended(tmp_path) -> None:
    one = Run(tmp_path, evict_after_s=30.0, **EVICTING)
    found = [one.train(**SLOW) for _ in range(4)]
    (ended,) = found[3]
    assert [len(each) for each in found[:3]] == [0, 1, 0]
    assert ended.straggler.task == "worker 1"
    assert ended.text.startswith(
        "Ending worker 1: it has been slow for 33 s, and evict_slow is 1.6. worker 1 is slow in "
    )


def test_no_more_are_ended_than_allowed(tmp_path) -> None:
    one = Run(tmp_path, evict_after_s=0.0, max_evictions=2, **EVICTING)
    found = [each for _ in range(5) for each in one.train(**SLOW) if each.reason]
    assert len(found) == 2


@pytest.mark.parametrize("options", [{}, {**EVICTING, "max_evictions": 0}])
def test_none_is_ended_by_default(tmp_path, options) -> None:
    one = Run(tmp_path, **options)
    found = [each for _ in range(8) for each in one.train(**SLOW)]
    assert [each.reason for each in found] == [""]


def test_task_that_does_not_run_is_no_straggler(tmp_path) -> None:
    one = Run(tmp_path)
    one.train(**SLOW)
    one.slow.find(one.now_s, ("worker 0", "worker 2"))
    assert one.slow.find(one.now_s + 2 * WINDOW_S, ("worker 0", "worker 2")) == []


def test_events_of_an_earlier_start_count_no_more(tmp_path) -> None:
    one = Run(tmp_path)
    one.train(**SLOW)
    one.slow.begin(one.now_s)
    assert one.slow.find(one.now_s + 2 * WINDOW_S, RUNNING) == []


def test_few_steps_are_waited_for(tmp_path) -> None:
    one = Run(tmp_path, evict_after_s=0.0, **EVICTING)
    assert one.train(num_steps=3, **SLOW) == []
    (ended,) = one.train(num_steps=3, **SLOW)
    assert ended.reason


def test_launch_without_a_folder_follows_nothing() -> None:
    assert followed_tasks(LaunchOptions(workers=3)) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"survivors": True}, "evict_slow=2 with run_dir=None(?s:.)*add what is missing"),
        ({"run_dir": "run"}, "and max_restarts=0(?s:.)*survivors=True, or"),
    ],
)
def test_eviction_that_would_end_the_job_is_refused(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        followed_tasks(LaunchOptions(evict_slow=2, **options))


_TRAIN = """
import itertools, time
from pathlib import Path
from stratagem.observe.goodput import EventWriter, StepWaits

def is_running(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"

writer = EventWriter("run", "worker", task["index"], num_processes=3, interval_s=0.0)
own_s = 0.05 if task["index"] == 1 else 0.01
Path(f"own-{task['index']}").write_text(str(os.getpid()))
Path(f"own-{task['index']}").rename(f"ready-{task['index']}")
ready = [Path(f"ready-{index}") for index in range(3)]
while not all(path.exists() for path in ready):
    time.sleep(0.01)
begin_s = max(path.stat().st_mtime for path in ready)
slow = int(ready[1].read_text())
for step in itertools.count(1):  # in lockstep, until the launcher has ended the slow one
    if not is_running(slow):
        break
    time.sleep(max(0.0, begin_s + 0.05 * step - time.time()))
    waits = StepWaits(waited_s=0.05 - own_s, input_s=own_s - 0.005)
    writer.step(step, duration_s=0.05, waits=waits)
writer.end(0)
"""


_SURVIVORS = {"survivors": True}
_RESTARTS = {"max_restarts": 1, "cold_restarts": True}
_SURVIVORS_AND_RESTARTS = {**_SURVIVORS, **_RESTARTS}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        _SURVIVORS_AND_RESTARTS,
        _SURVIVORS,
        _RESTARTS,
    ],
    ids=str,
)
def test_slow_worker_is_ended_and_the_others_finish(
    capfd, script, folder, monkeypatch, options
) -> None:
    monkeypatch.setattr(slow_tasks, "WINDOW_S", 0.5)
    monkeypatch.setattr(slow_tasks, "_POLL_EVERY_S", 0.1)
    is_restarted = """
if os.environ["STRATAGEM_RESTART_COUNT"] == "1":
    open("restarted", "a").close()
    raise SystemExit(0)
"""
    text = f"{is_restarted}{_TRAIN}"
    survivors = "survivors" in options
    outcome = scripts.run_script(
        script(text),
        workers=3,
        run_dir="run",
        evict_slow=2.0,
        evict_after_s=0.0,
        **options,
    )
    assert outcome.exit_code == 0
    err = capfd.readouterr().err
    assert "[launch] Ending worker 1: it has been slow for 0 s, and evict_slow is 2." in err
    assert re.search(r"worker 1 is slow in input: the others wait \d+ ms of each \d+ ms step", err)
    why = "worker 1 failed{}: ended by the launcher: it has been slow for 0 s"
    assert why.format("" if survivors else " first") in err
    assert (folder / "restarted").exists() is not survivors
    text = "[launch] Not starting worker 1 again while others run: it would be as slow.\n"
    assert err.count(text) == (options == _SURVIVORS_AND_RESTARTS)
    (launcher,) = [one for one in read_run("run").processes if one.task == "launcher 0"]
    (event,) = [one for one in launcher.events if isinstance(one, StragglerEvent)]
    assert (event.task, event.cause, event.is_evicted) == ("worker 1", "input", True)
    assert 0.02 < event.late_s < event.step_s
