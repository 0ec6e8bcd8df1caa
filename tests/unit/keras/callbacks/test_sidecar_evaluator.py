"""An evaluator beside training: which checkpoints it takes, what it measures, how it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.callbacks import checkpoint_loop
from stratagem.keras.callbacks.checkpoint_loop import KerasFiles, StopNotice
from tests.parity.comparison import mirrored, regression

_X, _Y = regression(11)
_SHORT_S = 0.02

Write = Callable[..., None]
Between = Callable[..., None]


def _model(optimizer: Any = "sgd", num_units: int = 1) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(num_units)])
    model.compile(optimizer, loss="mse", metrics=["mae"])
    return model


def _weights(epoch: int) -> list[np.ndarray]:
    return [np.full((3, 1), epoch / 4, "float32"), np.full(1, -epoch, "float32")]


def _by_hand(epoch: int) -> dict[str, float]:
    kernel, bias = _weights(epoch)
    errors = _X @ kernel + bias - _Y
    return {"loss": float(np.mean(errors**2)), "mae": float(np.mean(np.abs(errors)))}


@pytest.fixture(scope="module")
def trainer() -> Any:
    """Stands for the workers, with an optimizer that has made ten steps an epoch."""
    model = _model("adam")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.fixture(scope="module")
def model() -> Any:
    return _model("adam")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def write(trainer: Any, folder: Path) -> Write:
    """Writes the checkpoint of an epoch, as `ModelCheckpoint` does; `share` is how much of it."""

    def written(epoch: int, *, share: float = 1.0) -> None:
        folder.mkdir(exist_ok=True)
        trainer.set_weights(_weights(epoch))
        trainer.optimizer.iterations.assign(10 * epoch)
        path = folder / f"ckpt-{epoch:04d}.weights.h5"
        trainer.save_weights(path)
        if share < 1:
            whole = path.read_bytes()
            path.write_bytes(whole[: int(share * len(whole))])
        os.utime(path, (1000 + epoch + share, 1000 + epoch + share))

    return written


@pytest.fixture
def between_looks(monkeypatch: pytest.MonkeyPatch) -> Between:
    """Does one thing after each look at the folder, where the evaluator would wait."""

    def script(*actions: Callable[[], Any] | None) -> None:
        left = iter(actions)

        def wait(notice: StopNotice, seconds: float) -> None:
            action = next(left, None)
            if action is not None:
                action()

        monkeypatch.setattr(StopNotice, "wait", wait)

    return script


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    fake = _Clock()
    monkeypatch.setattr(checkpoint_loop, "time", fake)
    return fake


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signal.signal(signal.SIGTERM, before)


def _evaluator(model: Any, folder: Path, **arguments: Any) -> sg.SidecarEvaluator:
    limits = {"timeout_s": 60, "poll_s": 0.001, **arguments}
    return sg.SidecarEvaluator(model, (_X, _Y), folder, **limits)


def _epochs(evaluations: Any) -> list[int | None]:
    return [one.epoch for one in evaluations]


def _assert_measured(evaluation: Any, epoch: int) -> None:
    assert evaluation.epoch == epoch
    assert evaluation.step == 10 * epoch
    assert evaluation.checkpoint.name == f"ckpt-{epoch:04d}.weights.h5"
    assert evaluation.logs == pytest.approx(_by_hand(epoch), rel=1e-5)


class _Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class _Notes(keras.callbacks.Callback):
    """Notes what it is told, and does something after an evaluation."""

    def __init__(self, then: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []
        self.then = then

    def set_checkpoint(self, checkpoint: Any) -> None:
        self.calls.append(("checkpoint", checkpoint.name))

    def on_test_begin(self, logs: Any = None) -> None:
        self.calls.append(("begin", None))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch", batch))

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(("end", dict(logs)))
        if self.then is not None:
            then, self.then = self.then, None
            then()


@pytest.mark.parametrize("num_replicas", [0, 2])
def test_newest_is_evaluated_with_the_numbers_of_its_weights(
    write, folder, num_replicas, capsys
) -> None:
    for epoch in (1, 2, 11):
        write(epoch)
    with mirrored(num_replicas).scope() if num_replicas else contextlib.nullcontext():
        model = _model("adam")
    (evaluation,) = _evaluator(model, folder, max_evaluations=3).start()
    _assert_measured(evaluation, 11)
    expected = _by_hand(11)
    line = f"ckpt-0011.weights.h5: loss {expected['loss']:.4g}, mae {expected['mae']:.4g} ("
    assert capsys.readouterr().out.startswith(line)


def test_checkpoints_are_evaluated_as_they_appear(write, folder, model, between_looks) -> None:
    """The folder is not there at first; of those that come meanwhile the newest is taken."""
    between_looks(
        None,
        lambda: write(1),
        None,
        None,
        lambda: (write(2), write(3), write(4)),
        None,
        lambda: write(5),
    )
    evaluations = _evaluator(model, folder, max_evaluations=5).start()
    assert _epochs(evaluations) == [1, 4, 5]
    for evaluation, epoch in zip(evaluations, (1, 4, 5), strict=True):
        _assert_measured(evaluation, epoch)


def test_file_that_stays_half_written_is_an_error(write, folder, model) -> None:
    write(1)
    write(2, share=0.5)
    evaluator = _evaluator(model, folder, timeout_s=_SHORT_S)
    with pytest.raises(RuntimeError, match=r"ckpt-0002\.weights\.h5 cannot be read: OSError"):
        evaluator.start()
    (evaluation,) = evaluator.evaluations
    _assert_measured(evaluation, 1)


@pytest.mark.parametrize("every", [False, True])
def test_half_written_file_gives_way_to_a_newer_one(write, folder, model, capsys, every) -> None:
    write(1, share=0.5)
    write(2)
    evaluator = _evaluator(
        model, folder, timeout_s=_SHORT_S, max_evaluations=2, every_checkpoint=every
    )
    (evaluation,) = evaluator.start()
    _assert_measured(evaluation, 2)
    assert ("a newer one exists" in capsys.readouterr().err) is every


def test_file_that_is_removed_before_it_is_read_is_skipped(
    write, folder, model, between_looks, capsys, monkeypatch
) -> None:
    load = KerasFiles.load

    def remove_first(self: Any, checkpoint: Any, model: Any) -> None:
        if checkpoint.name == "ckpt-0001.weights.h5":
            checkpoint.path.unlink()
        load(self, checkpoint, model)

    monkeypatch.setattr(KerasFiles, "load", remove_first)
    between_looks(lambda: write(1), None, lambda: write(2))
    (evaluation,) = _evaluator(model, folder, max_evaluations=2).start()
    _assert_measured(evaluation, 2)
    path = folder / "ckpt-0001.weights.h5"
    assert capsys.readouterr().err == (
        f"SidecarEvaluator: skipped {path}, which was deleted before it could be read.\n"
    )


def test_file_of_another_model_is_an_error_at_once(write, folder) -> None:
    write(1)
    other = _model(num_units=2)
    with pytest.raises(ValueError, match=r"ckpt-0001\.weights\.h5 does not fit the model"):
        _evaluator(other, folder).start()


def test_folder_without_checkpoints_is_an_error_in_the_end(folder, model, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_CHECKPOINT_TIMEOUT_S", str(_SHORT_S))
    evaluator = sg.SidecarEvaluator(model, (_X, _Y), folder, poll_s=0.001)
    words = rf"No new checkpoint appeared in {folder} for 0 s; none so far(?s:.)*within 0.02 s"
    words += r"(?s:.)*max_evaluations(?s:.)*STRATAGEM_CHECKPOINT_TIMEOUT_S"
    with pytest.raises(sg.errors.DeadlineExceededError, match=words):
        evaluator.start()


def test_limit_begins_again_while_a_file_grows(write, folder, model, between_looks, clock) -> None:
    def grow(share: float) -> None:
        clock.sleep(8)
        write(1, share=share)

    between_looks(lambda: grow(0.2), lambda: grow(0.4), lambda: grow(0.6), lambda: grow(1.0))
    (evaluation,) = _evaluator(model, folder, max_evaluations=1, timeout_s=10).start()
    _assert_measured(evaluation, 1)
    assert clock.now_s == 132


def test_limit_is_kept_to_the_second(write, folder, model, between_looks, clock) -> None:
    write(1)
    between_looks(None, lambda: clock.sleep(9), lambda: clock.sleep(1))
    evaluator = _evaluator(model, folder, timeout_s=10)
    words = r"for 10 s; the last was ckpt-0001\.weights\.h5"
    with pytest.raises(sg.errors.DeadlineExceededError, match=words):
        evaluator.start()
    assert clock.now_s == pytest.approx(110.001)
    assert _epochs(evaluator.evaluations) == [1]
    assert not evaluator.was_stopped


def test_line_tells_where_checkpoints_are_expected(
    folder, model, capsys, monkeypatch, between_looks, write
) -> None:
    monkeypatch.setattr(checkpoint_loop, "_FIRST_NEWS_S", 0.0)
    between_looks(None, None, lambda: write(1))
    _evaluator(model, folder, max_evaluations=1).start()
    assert capsys.readouterr().err == (
        f"SidecarEvaluator: found no *.weights.h5 or *.keras in {folder} after 0 s.\n"
    )


def test_sigterm_while_it_waits_is_the_end(write, folder, model, between_looks) -> None:
    between_looks(lambda: write(1), None, None, lambda: signal.raise_signal(signal.SIGTERM))
    evaluator = _evaluator(model, folder)
    (evaluation,) = evaluator.start()
    _assert_measured(evaluation, 1)
    assert evaluator.was_stopped


@pytest.mark.parametrize(("every", "epochs"), [(False, [1, 3]), (True, [1, 2, 3])])
def test_what_was_written_before_sigterm_is_still_evaluated(
    write, folder, model, every, epochs
) -> None:
    """Two checkpoints are written, and the workers end, while the first one is evaluated."""

    def end() -> None:
        write(2)
        write(3)
        signal.raise_signal(signal.SIGTERM)

    write(1)
    evaluator = _evaluator(model, folder, every_checkpoint=every, callbacks=[_Notes(end)])
    evaluations = evaluator.start()
    assert _epochs(evaluations) == epochs
    for evaluation in evaluations:
        _assert_measured(evaluation, evaluation.epoch)
    assert evaluator.was_stopped


def test_callbacks_see_each_evaluation_and_its_checkpoint(write, folder, model) -> None:
    for epoch in (1, 2, 3):
        write(epoch)
    notes = _Notes()
    given: Any = {"max_evaluations": 2, "every_checkpoint": True, "callbacks": [notes]}
    evaluations = _evaluator(model, folder, **given).start()
    for evaluation, epoch in zip(evaluations, (1, 2), strict=True):
        _assert_measured(evaluation, epoch)
    assert notes.calls == [
        call
        for evaluation in evaluations
        for call in [
            ("checkpoint", evaluation.checkpoint.name),
            ("begin", None),
            ("batch", 0),
            ("end", evaluation.logs),
        ]
    ]
    assert notes.model is model


def test_steps_end_an_evaluation_early(write, folder, model) -> None:
    write(1)
    data = sg.input.Dataset((_X[:8], _Y[:8]), batch_size=4)
    notes = _Notes()
    sg.SidecarEvaluator(model, data, folder, 1, 1, notes, poll_s=0.001).start()
    assert [call for call in notes.calls if call[0] == "batch"] == [("batch", 0)]

    def lost() -> None:
        raise FileNotFoundError("images.bin")

    evaluator = _evaluator(model, folder, callbacks=_Notes(lost))
    with pytest.raises(FileNotFoundError, match=r"images\.bin"):  # an error of the evaluation
        evaluator.start()
    assert evaluator.evaluations == ()


def test_model_that_is_not_built_yet_is_built_on_the_data(write, folder) -> None:
    write(2)
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("adam", loss="mse", metrics=["mae"])
    (evaluation,) = _evaluator(model, folder, max_evaluations=1).start()
    _assert_measured(evaluation, 2)


def test_step_is_reported_only_where_the_optimizer_is_the_one_of_training(
    write, folder, model
) -> None:
    write(2)
    other = _model(keras.optimizers.SGD(0.1, momentum=0.9))
    other.optimizer.iterations.assign(7)
    (evaluation,) = _evaluator(other, folder, max_evaluations=1).start()
    assert evaluation.step is None
    assert evaluation.logs == pytest.approx(_by_hand(2), rel=1e-5)


# SIGTERM as notice, and what there was before it.


def test_notice_ends_a_wait_and_the_handler_goes() -> None:
    with StopNotice() as notice:
        notice.wait(0.01)
        assert not notice.is_given
        sender = threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGTERM))
        sender.start()
        notice.wait(60)
        sender.join()
        assert notice.is_given
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a second one ends the process
    with pytest.raises(ZeroDivisionError), StopNotice():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_program_stays_and_a_thread_gets_no_notice() -> None:
    seen: list[Any] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    with StopNotice() as notice:
        signal.raise_signal(signal.SIGTERM)
        assert not notice.is_given
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def work() -> None:
        with StopNotice() as notice:
            notice.wait(0.01)
            seen.append((notice.is_given, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.SIGTERM, (False, signal.SIG_DFL)]


# Arguments that an evaluator cannot work with, named before it waits for anything.


def test_model_of_workers_that_train_together_is_refused(tmp_path, monkeypatch) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        model = _model()
    monkeypatch.setitem(vars(strategy.topology), "spans_processes", True)
    with pytest.raises(ValueError, match="which spans several processes"):
        sg.SidecarEvaluator(model, (_X, _Y), tmp_path)


_WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": 3}, TypeError, "model=3 is of type int"),
    ({"model": keras.Sequential(name="bare")}, ValueError, "'bare' is not compiled"),
    ({"data": (1, 2, 3, 4)}, ValueError, "data is a tuple of length 4"),
    ({"data": iter([])}, ValueError, "list_iterator(?s:.)*read again for each checkpoint"),
    ({"checkpoint_dir": 3}, TypeError, "checkpoint_dir=3 is of type int"),
    ({"checkpoint_dir": "gs://bucket/a"}, ValueError, "'gs://bucket/a' is not a local folder"),
    ({"checkpoint_dir": __file__}, ValueError, "test_sidecar_evaluator.py' is not a local folder"),
    ({"steps": 0}, ValueError, "received steps=0"),
    ({"steps": 1.5}, TypeError, "steps=1.5 is of type float"),
    ({"max_evaluations": -1}, ValueError, "received max_evaluations=-1"),
    ({"max_evaluations": True}, TypeError, "max_evaluations=True is of type bool"),
    ({"timeout_s": 0}, ValueError, "received timeout_s=0"),
    ({"timeout_s": float("inf")}, ValueError, "a number above 0"),
    ({"poll_s": float("nan")}, ValueError, "received poll_s=nan"),
    ({"poll_s": "1"}, TypeError, "poll_s='1' is of type str"),
    ({"callbacks": [print]}, TypeError, "of type builtin_function_or_method"),
    (
        {"callbacks": sg.SidecarEvaluatorModelExport("a/b.keras"), "checkpoint_dir": "a"},
        ValueError,
        "SidecarEvaluatorModelExport writes to checkpoint_dir, 'a'",
    ),
]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    _WRONG,
    ids=lambda value: str(value).partition(" object at ")[0][:40],
)
def test_argument_that_cannot_be_right_is_named(wrong, error, words, tmp_path) -> None:
    arguments = {"model": _model(), "data": (_X, _Y), "checkpoint_dir": tmp_path, **wrong}
    with pytest.raises(error, match=words):
        sg.SidecarEvaluator(**arguments)
