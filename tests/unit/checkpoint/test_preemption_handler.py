"""PreemptionCheckpointHandler in one process, from the notice to the restart."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import pytest

import stratagem as sg
from tests.unit.checkpoint.groups import LIMIT_S, Bell


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def make() -> Iterator[Callable[..., sg.PreemptionCheckpointHandler]]:
    """Creates handlers, stops them afterwards, and checks that signal handlers are restored."""
    before = signal.getsignal(signal.SIGTERM)
    made: list[sg.PreemptionCheckpointHandler] = []

    def new(*args: Any, **kwargs: Any) -> sg.PreemptionCheckpointHandler:
        made.append(sg.PreemptionCheckpointHandler(None, *args, **kwargs))
        return made[-1]

    yield new
    for handler in made:
        handler.stop()
    after = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    assert after == before


class Training:
    """A program that counts its steps in a variable, like a restarted process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.step = sg.Variable(0, dtype="int32")
        self.checkpoint = sg.train.Checkpoint(step=self.step)

    def manager(self, max_to_keep: int | None = None, **kwargs: Any) -> sg.train.CheckpointManager:
        return sg.train.CheckpointManager(self.checkpoint, self.folder, max_to_keep, **kwargs)

    def train(self, notice_at: int | None = None, notify: Callable[[], Any] | None = None) -> int:
        self.step.assign_add(1)
        if int(self.step) == notice_at:
            (notify or functools.partial(signal.raise_signal, signal.SIGTERM))()
        return int(self.step)

    def run(self, handler: sg.PreemptionCheckpointHandler, *args: Any, **kwargs: Any) -> list[int]:
        """Trains 50 steps with the handler, unless it exits before."""
        return [handler.run(self.train, *args, **kwargs) for _ in range(50)]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def test_step_gets_its_arguments_and_its_result_comes_back(tmp_path: Path, make) -> None:
    training = Training(tmp_path)
    handler = make(training.checkpoint, tmp_path)
    assert handler.run(lambda *args, **kwargs: (args, kwargs), 1, 2, three=3) == (
        (1, 2),
        {"three": 3},
    )
    assert handler.total_run_calls == 1

    def fail() -> None:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):  # raised as it is, and not counted
        handler.run(fail)
    assert handler.total_run_calls == 1
    assert names(tmp_path) == []


def test_one_checkpoint_for_the_notice_and_then_all_steps_once(tmp_path: Path, make) -> None:
    training = Training(tmp_path)
    handler = make(training.manager())
    with pytest.raises(SystemExit) as leaving:
        training.run(handler, notice_at=7)
    assert leaving.value.code == 42
    assert names(tmp_path) == ["ckpt-1"]
    handler.stop()

    again = Training(tmp_path)
    handler = make(again.manager())
    assert (handler.total_run_calls, int(again.step)) == (7, 7)
    assert again.run(handler) == list(range(8, 58))
    assert names(tmp_path) == ["ckpt-1"]


def test_folder_of_a_checkpoint_keeps_the_newest(tmp_path: Path, make) -> None:
    for attempt in (1, 2, 3):
        training = Training(tmp_path)
        handler = make(training.checkpoint, tmp_path)
        assert handler.total_run_calls == 2 * (attempt - 1)
        with pytest.raises(SystemExit):
            training.run(handler, notice_at=2 * attempt)
        handler.stop()
        assert names(tmp_path) == [f"ckpt-{attempt}"]


def test_count_is_in_every_checkpoint_and_ignored_by_other_readers(tmp_path: Path, make) -> None:
    training = Training(tmp_path)
    handler = make(training.checkpoint, tmp_path)
    for _ in range(4):
        handler.run(training.train)
    path = training.checkpoint.save(tmp_path / "ckpt")
    handler.stop()

    plain = Training(tmp_path)
    plain.checkpoint.restore(path)
    assert int(plain.step) == 4
    plain.step.assign(5)
    without_count = plain.checkpoint.save(tmp_path / "ckpt")

    again = Training(tmp_path)
    handler = make(again.manager())
    assert (int(again.step), handler.total_run_calls) == (5, 0)
    handler.stop()
    again.checkpoint.restore(path)
    assert (int(again.step), handler.total_run_calls) == (4, 4)
    assert without_count.endswith("ckpt-2")


def test_custom_exit_and_save_functions(tmp_path: Path, make) -> None:
    training = Training(tmp_path)
    looked, done = threading.Event(), []
    wanted = threading.Event()

    def watch() -> bool:
        looked.set()
        return wanted.is_set()

    config = sg.TerminationConfig(
        watch,
        exit_fn=lambda: done.append("exit"),
        save_fn=lambda *args, **kwargs: done.append((args, kwargs)),
        poll_interval_s=0.001,
    )
    handler = make(training.checkpoint, tmp_path, config)
    assert looked.wait(LIMIT_S)
    handler.save_checkpoint_if_preempted()
    wanted.set()
    while not done:
        handler.save_checkpoint_if_preempted("a", b="c")
    assert done == [(("a",), {"b": "c"}), "exit"]
    assert names(tmp_path) == []
    for _ in range(3):  # `exit_fn` has returned: training goes on, and nothing is saved again
        handler.save_checkpoint_if_preempted()
        handler.run(training.train)
    assert len(done) == 2


@pytest.mark.parametrize("checks_interval", [False, True])
def test_loop_without_run_counts_steps_before_the_save(
    tmp_path: Path, make, checks_interval: bool
) -> None:
    """Saved whether the interval says so or not, unless the arguments ask for it."""
    training = Training(tmp_path)
    manager = training.manager(step_counter=training.step, checkpoint_interval=100)
    handler = make(manager)
    for _ in range(4):
        training.train()
        handler.save_checkpoint_if_preempted(17)
    training.train(notice_at=5)
    with pytest.raises(SystemExit):
        handler.save_checkpoint_if_preempted(17, checks_interval)
    assert names(tmp_path) == ([] if checks_interval else ["ckpt-17"])
    handler.stop()
    again = Training(tmp_path)
    found = make(again.manager()).total_run_calls, int(again.step)
    assert found == ((0, 0) if checks_interval else (5, 5))


def test_grace_is_trained_through_between_two_checkpoints(tmp_path: Path, make) -> None:
    training = Training(tmp_path)
    bell = Bell()
    config = sg.TerminationConfig(sources=[bell], grace_period=3600)
    handler = make(training.manager(), termination_config=config)
    for _ in range(20):
        handler.run(training.train, 4, bell.ring)
    assert names(tmp_path) == ["ckpt-1"]
    with pytest.raises(SystemExit):
        training.run(handler, 25, functools.partial(bell.ring, ago_s=3600))
    assert names(tmp_path) == ["ckpt-1", "ckpt-2"]
    handler.stop()
    assert make(Training(tmp_path).manager()).total_run_calls == 25


def test_grace_that_ends_during_the_first_save_is_no_reason_for_a_second(
    tmp_path: Path, make
) -> None:
    training = Training(tmp_path)
    bell = Bell()
    saved = []

    def save() -> None:
        saved.append(int(training.step))
        bell.ring(ago_s=3600)

    config = sg.TerminationConfig(sources=[bell], grace_period=3600, save_fn=save)
    handler = make(training.manager(), termination_config=config)
    with pytest.raises(SystemExit):
        training.run(handler, 4, bell.ring)
    assert saved == [4]


def test_notice_before_the_first_step(tmp_path: Path, make, capsys) -> None:
    training = Training(tmp_path / "run")
    handler = make(training.manager())
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit):
        handler.run(training.train)
    assert (int(training.step), names(tmp_path / "run")) == (0, ["ckpt-1"])
    handler.stop()
    tmp_path /= "empty"  # before there is anything to save
    model = keras.Sequential([keras.layers.Dense(1)])
    handler = make(sg.train.Checkpoint(model=model), tmp_path)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as leaving:
        handler.run(model.build, (None, 3))
    assert leaving.value.code == 42
    assert names(tmp_path) == []
    assert "before the first step: nothing to save yet" in capsys.readouterr().err
    handler = make(sg.train.Checkpoint(model=keras.Sequential([keras.layers.Dense(1)])), tmp_path)
    handler.run(signal.raise_signal, signal.SIGTERM)
    with pytest.raises(ValueError, match=r"model=.* has no variables yet"):  # no step builds it
        handler.run(signal.raise_signal, signal.SIGTERM)


def test_failed_save_raises_and_leaves_nothing(tmp_path: Path, make) -> None:
    training = Training(tmp_path / "file" / "run")
    (tmp_path / "file").write_text("")
    handler = make(training.manager())
    with pytest.raises(OSError, match="could not be written"):
        training.run(handler, notice_at=2)
    assert int(training.step) == 2


def test_scope_saves_at_its_end_after_a_notice_alone(tmp_path: Path, make) -> None:
    training = Training(tmp_path)
    handler = make(training.manager())
    with handler.watch_preemption_scope():
        handler.run(training.train)

    def fail() -> None:
        signal.raise_signal(signal.SIGTERM)
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"), handler.watch_preemption_scope():
        handler.run(fail)
    assert names(tmp_path) == []
    handler.stop()
    handler = make(training.manager())
    with pytest.raises(SystemExit), handler.watch_preemption_scope():
        training.run(handler, notice_at=int(training.step) + 50)
    assert names(tmp_path) == ["ckpt-1"]


def test_second_signal_disturbs_neither_the_save_nor_the_end(
    tmp_path: Path, make, monkeypatch, capsys
) -> None:
    training = Training(tmp_path)
    manager = training.manager()
    handler = make(manager)
    save = manager.save

    def save_disturbed(*args: Any, **kwargs: Any) -> str | None:
        signal.raise_signal(signal.SIGTERM)
        return save(*args, **kwargs)

    monkeypatch.setattr(manager, "save", save_disturbed)
    with pytest.raises(SystemExit) as leaving:
        training.run(handler, notice_at=3)
    assert leaving.value.code == 42
    assert names(tmp_path) == ["ckpt-1"]
    assert "saved after step 3: SIGTERM was sent to process" in capsys.readouterr().err


def test_restore_that_fails_leaves_signals_as_they_were(tmp_path: Path, make) -> None:
    training = Training(tmp_path)
    handler = make(training.checkpoint, tmp_path)
    path = training.checkpoint.save(tmp_path / "ckpt")
    handler.stop()
    before = signal.getsignal(signal.SIGTERM)
    other = sg.train.Checkpoint(another=sg.Variable(0))
    with pytest.raises(ValueError, match="holds no another"):
        make(other, tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before
    assert path.endswith("ckpt-1")


def _resolver(cluster: Any, task_type: str, index: int) -> Any:
    spec = sg.ClusterSpec(cluster)
    return sg.cluster_resolver.SimpleClusterResolver(spec, task_type=task_type, task_id=index)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({0: "abc"}, TypeError, "cluster_resolver='abc' is of type str"),
        ({1: "abc"}, TypeError, "checkpoint_or_checkpoint_manager='abc' is of type str"),
        ({3: "abc"}, TypeError, "termination_config='abc' is of type str"),
        ({2: None}, ValueError, "Checkpoint was passed with checkpoint_dir="),
        ({2: ""}, ValueError, "Checkpoint was passed with checkpoint_dir="),
        (
            {0: _resolver({"chief": ["a:1"], "ps": ["b:1"]}, "chief", 0)},
            NotImplementedError,
            "The cluster has parameter servers",
        ),
        (
            {0: _resolver({"worker": ["a:1", "b:1"]}, "worker", 1)},
            RuntimeError,
            "has 2 processes, but this one is not connected to the others",
        ),
    ],
)
def test_what_cannot_be_handled_is_refused(change, error, words, tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
    arguments: dict[int, Any] = {0: None, 1: checkpoint, 2: tmp_path, 3: None, **change}
    with pytest.raises(error, match=words):
        sg.PreemptionCheckpointHandler(*arguments.values())
    alone = _resolver({"worker": ["a:1"]}, "worker", 0)
    sg.PreemptionCheckpointHandler(alone, checkpoint, tmp_path).stop()


def test_signals_are_heard_in_the_main_thread_only(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
    errors: list[BaseException] = []

    def start() -> None:
        try:
            sg.PreemptionCheckpointHandler(None, checkpoint, tmp_path)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(LIMIT_S)
    assert "Cannot listen to signals in thread" in str(errors[0])
