"""The ported guides of tf.distribute end as TensorFlow's guides say that they do."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.examples.programs import (
    EXAMPLES,
    LAUNCHER,
    LIMIT_S,
    assert_same,
    environment,
    promised,
    run,
)
from tests.multiprocess.cluster import addresses

_GUIDES = sorted((EXAMPLES / "guides").glob("*.py"))
_DYING = Path(__file__).with_name("dying_guide.py")
_LABEL = re.compile(r"\[(\w+ \d+)\] (.*)")


def _guide(number: int) -> Path:
    return _GUIDES[number - 1]


def _numbers(line: str) -> list[float]:
    return [float(text) for text in re.findall(r"-?\d+\.\d+", line)]


def _by_task(lines: Sequence[str]) -> dict[str, list[str]]:
    """What each task printed, by its name."""
    of_task: dict[str, list[str]] = {}
    for line in lines:
        if found := _LABEL.match(line):
            of_task.setdefault(found[1], []).append(found[2])
    return of_task


def _launch(
    number: int, *arguments: str, options: Sequence[str] = (), cwd: Path
) -> dict[str, list[str]]:
    launcher = (*LAUNCHER, "--workers", "2", *options)
    return _by_task(run(_guide(number), *arguments, launcher=launcher, cwd=cwd))


def _by_hand(command: Sequence[str], cwd: Path) -> list[tuple[int, list[str], str]]:
    """Starts two workers that TF_CONFIG tells apart; returns how each ended and what it printed."""
    cluster = {"worker": addresses(2)}
    configs = [
        json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        for index in range(2)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment(TF_CONFIG=config, PYTHONPATH=str(EXAMPLES.parent)),
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for config in configs
    ]
    try:
        ended = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [
        (process.returncode, output.splitlines(), errors)
        for process, (output, errors) in zip(processes, ended, strict=True)
    ]


def _has_file(path: Path) -> bool:
    """Whether it is a file, or a folder with one in it."""
    return path.is_file() or any(one.is_file() for one in path.glob("**/*"))


def test_there_are_ten_guides_that_name_what_they_port_and_what_differs() -> None:
    assert [path.name[:3] for path in _GUIDES] == [f"{number:02d}_" for number in range(1, 11)]
    for path in _GUIDES:
        text = path.read_text()
        assert promised(path)
        assert re.search(r'"""Ports "', text)
        assert re.search(r"https://www\.tensorflow\.org/(tutorials|guide)/\S+", text)
        assert "\nDifferences from TensorFlow's guide:\n" in text


@pytest.mark.slow
def test_distributed_input_keeps_the_order_of_its_examples(tmp_path: Path) -> None:
    lines = run(_guide(8), cwd=tmp_path)
    assert_same(lines[-1], promised(_guide(8)))
    assert "PerReplica[0.0 | 1.0]" in lines


@pytest.mark.slow
def test_keras_guide_trains_and_writes_checkpoints_logs_and_a_model(tmp_path: Path) -> None:
    lines = run(_guide(1), cwd=tmp_path)
    folder = tmp_path / "runs" / "guides" / "keras"
    assert len(list((folder / "training_checkpoints").iterdir())) == 12
    assert list(folder.glob("logs/**/events.*"))
    assert (folder / "my_model.keras").is_file()
    assert_same(lines[-1], promised(_guide(1)))
    trained, plain, replicated = _numbers(lines[-1])
    assert trained == plain == replicated >= 0.97  # the guide has 0.98 of MNIST
    rates = [line.rpartition(" ")[2] for line in lines if line.startswith("Learning rate")]
    assert rates == 3 * ["1e-02"] + 4 * ["1e-03"] + 5 * ["1e-04"]


@pytest.mark.slow
def test_custom_training_restores_what_it_saved_last(tmp_path: Path) -> None:
    lines = run(_guide(2), cwd=tmp_path)
    assert_same(lines[-1], promised(_guide(2)))
    (saved,) = [line for line in lines if line.startswith("Epoch 9, ")]
    assert _numbers(lines[-1])[0] == pytest.approx(_numbers(saved)[-1], abs=0.05)
    assert _numbers(lines[-1])[0] >= 90  # the guide has 90 of Fashion MNIST
    losses = [_numbers(line)[0] for line in lines if re.match(r"Epoch \d+, ", line)]
    assert losses[0] > 1.5
    assert losses[-1] < 0.15


@pytest.mark.slow
def test_multi_worker_keras_is_launched(tmp_path: Path) -> None:
    printed = _launch(3, cwd=tmp_path)
    for worker in ("worker 0", "worker 1"):
        assert_same(printed[worker][-1], promised(_guide(3)))
        done = [line for line in printed[worker] if line.startswith("Steps of this run")]
        assert done == 2 * ["Steps of this run: 210 of 210"]
    folder = tmp_path / "runs" / "guides" / "multi_worker_with_keras"
    assert sorted(path.name for path in folder.iterdir() if _has_file(path)) == [
        "ckpt",
        "keras-model.keras",
    ]


@pytest.mark.slow
def test_multi_worker_keras_goes_on_after_a_worker_was_killed(tmp_path: Path) -> None:
    (code, _, errors), (killed, _, _) = _by_hand([str(_DYING), "fit", str(_guide(3))], tmp_path)
    assert killed == -signal.SIGKILL
    assert code != 0
    assert "worker 1" in errors

    for code, lines, errors in _by_hand([str(_guide(3))], tmp_path):
        assert code == 0, errors
        done = [line for line in lines if line.startswith("Steps of this run")]
        assert done == ["Steps of this run: 140 of 210", "Steps of this run: 210 of 210"]
        assert_same(lines[-1], promised(_guide(3)))


@pytest.mark.slow
def test_multi_worker_loop_ends_alike_on_both_workers(tmp_path: Path) -> None:
    printed = _launch(4, str(tmp_path), cwd=tmp_path)
    assert printed["worker 0"][-3:] == printed["worker 1"][-3:]
    assert_same(printed["worker 0"][-1], promised(_guide(4)))
    accuracies = [_numbers(line)[0] for line in printed["worker 0"][-3:]]
    assert accuracies == sorted(accuracies)
    assert accuracies[-1] >= 0.93  # the guide has 0.93 of MNIST


@pytest.mark.slow
def test_multi_worker_loop_goes_on_after_a_worker_was_killed(tmp_path: Path) -> None:
    command = [str(_guide(4)), str(tmp_path)]
    (code, lines, errors), (killed, _, _) = _by_hand([str(_DYING), "save", *command], tmp_path)
    assert killed == -signal.SIGKILL
    assert code != 0
    assert "worker 1" in errors
    lines = [line for line in lines if line.startswith("Epoch")]
    assert [line[:8] for line in lines] == ["Epoch: 0"]
    before = _numbers(lines[0])[0]

    (code, lines, errors), (_, others, _) = _by_hand(command, tmp_path)
    assert code == 0, errors
    lines = [line for line in lines if line.startswith("Epoch")]
    assert lines == [line for line in others if line.startswith("Epoch")]
    assert [line[:8] for line in lines] == ["Epoch: 1", "Epoch: 2"]
    assert before < _numbers(lines[0])[0] < _numbers(lines[1])[0]


@pytest.mark.slow
def test_parameter_servers_train_by_fit_and_by_a_coordinator(tmp_path: Path) -> None:
    lines = run(_guide(5), cwd=tmp_path)
    assert_same(lines[-1], promised(_guide(5)))
    losses = [_numbers(line)[-1] for line in lines if "/step - loss" in line]
    assert len(losses) == 5
    assert losses == sorted(losses, reverse=True)
    accuracies = [_numbers(line)[0] for line in lines if line.startswith("Finished epoch")]
    assert len(accuracies) == 4
    assert accuracies[-1] == 1.0  # as the guide
    (final,) = [_numbers(line)[0] for line in lines if line.startswith("Final loss")]
    assert final < 0.05
    assert "Steps 21, to go on with epoch 4" in lines


@pytest.mark.slow
def test_estimator_is_evaluated_by_a_task_of_its_own(tmp_path: Path) -> None:
    printed = _launch(6, str(tmp_path), options=["--evaluator"], cwd=tmp_path)
    assert_same(printed["evaluator 0"][-1], promised(_guide(6)))
    assert list((tmp_path / "multiworker").glob("model.ckpt-*"))


@pytest.mark.slow
def test_saved_models_have_the_accuracy_that_they_had(tmp_path: Path) -> None:
    lines = run(_guide(7), cwd=tmp_path)
    assert_same(lines[-1], promised(_guide(7)))
    trained, restored, exported = _numbers(lines[-1])
    assert trained == restored == exported >= 0.9
    assert "True" in lines  # the subclassed model


@pytest.mark.slow
def test_loops_over_distributed_data_lower_the_loss(tmp_path: Path) -> None:
    lines = run(_guide(9), cwd=tmp_path)
    assert_same(lines[-1], promised(_guide(9)))
    steps = [float(line) for line in lines if re.fullmatch(r"0\.\d{4}", line)]
    assert len(steps) == 10
    assert steps == sorted(steps, reverse=True)
    losses = [_numbers(line)[-1] for line in lines if re.search(r"/step - loss", line)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
def test_dcgan_has_finite_losses_and_draws_images(tmp_path: Path) -> None:
    lines = run(_guide(10), cwd=tmp_path)
    assert_same(lines[-1], promised(_guide(10)))
    losses = [_numbers(line)[-2:] for line in lines if line.startswith("Time for epoch")]
    assert len(losses) == 12
    assert all(0 < loss < 10 for pair in losses for loss in pair)
