"""Every kind of data is read on from the next batch, in the order that it would have had."""

from __future__ import annotations

import errno
import functools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint.in_memory import MemoryBackup
from tests.marks import slow
from tests.unit.keras.callbacks.backups import (
    BATCH_SIZE,
    EPOCHS,
    NUM_BATCHES,
    AccidentError,
    EndAt,
    X,
    Y,
    assert_same,
    build,
    ended_and_again,
    strategy_named,
    values,
)


class Rows(keras.utils.PyDataset):
    """Batches with noise, in an order that each epoch draws from the global generators."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.order = np.arange(len(X))

    @property
    def num_batches(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> Any:
        rows = self.order[index * BATCH_SIZE : (index + 1) * BATCH_SIZE]
        x = X[rows]
        x[:, 1:] += self.noise(rows)
        return x, Y[rows]

    def noise(self, rows: Any) -> Any:
        return np.random.normal(0, 0.1, (len(rows), 3)).astype("float32")

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class QuietRows(Rows):
    """Draws nothing; Keras shuffles the batches."""

    def noise(self, rows: Any) -> Any:
        return np.float32(0)

    def on_epoch_end(self) -> None:
        pass


class StatefulRows(Rows):
    """Has a generator of its own, and says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(1)

    def noise(self, rows: Any) -> Any:
        return self.generator.normal(0, 0.1, (len(rows), 3)).astype("float32")

    def on_epoch_end(self) -> None:
        self.generator.shuffle(self.order)

    def get_state(self) -> Any:
        return {"order": self.order.tolist(), "generator": self.generator.bit_generator.state}

    def set_state(self, state: Any) -> None:
        self.order = np.array(state["order"])
        self.generator.bit_generator.state = state["generator"]


def generated() -> Iterator[Any]:
    """Without end, with noise."""
    dataset = Rows()
    while True:
        for index in range(NUM_BATCHES):
            yield dataset[index]
        dataset.on_epoch_end()


def batches() -> list[Any]:
    dataset = QuietRows()
    return [dataset[index] for index in range(NUM_BATCHES)]


class Shuffled:
    """An iterable that is another each time."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(2)

    def __iter__(self) -> Iterator[Any]:
        order = self.generator.permutation(NUM_BATCHES)
        yield from (batches()[index] for index in order)


def torch_loader(*, has_generator: bool) -> Any:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    generator = torch.Generator().manual_seed(5) if has_generator else None
    torch.manual_seed(4)
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(
        dataset, batch_size=BATCH_SIZE, shuffle=True, generator=generator
    )


def tensorflow_dataset(*, is_length_known: bool) -> Any:
    tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=3)
    if not is_length_known:
        dataset = dataset.filter(lambda x, y: True)
    return dataset.batch(BATCH_SIZE)


def grain_dataset() -> Any:
    grain = pytest.importorskip("grain", reason="Grain is not installed")
    pairs = list(zip(X, Y, strict=True))
    return grain.MapDataset.source(pairs).shuffle(seed=1).batch(BATCH_SIZE)


def arrays() -> Any:
    return sg.input.Dataset((X, Y), batch_size=BATCH_SIZE, shuffle=True, seed=1)


SOURCES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "PyDataset": (Rows, {}),
    "PyDataset with a state": (StatefulRows, {}),
    "PyDataset with workers": (lambda: QuietRows(workers=2, max_queue_size=3), {}),
    "PyDataset for part of an epoch": (QuietRows, {"steps_per_epoch": 4}),
    "generator": (generated, {"steps_per_epoch": 5}),
    "Dataset of arrays": (arrays, {}),
    "Dataset for part of an epoch": (arrays, {"steps_per_epoch": 3}),
    "Dataset of batches": (lambda: sg.input.Dataset(batches()), {}),
    "Dataset of a generator": (lambda: sg.input.Dataset(generated()), {"steps_per_epoch": 5}),
    "Dataset of an iterable": (lambda: sg.input.Dataset(Shuffled()), {}),
    "Dataset of Grain": (lambda: sg.input.Dataset(grain_dataset()), {}),
    "tf.data": (lambda: tensorflow_dataset(is_length_known=True), {}),
    "tf.data of unknown length": (lambda: tensorflow_dataset(is_length_known=False), {}),
    "torch": (lambda: torch_loader(has_generator=False), {}),
    "torch with a generator": (lambda: torch_loader(has_generator=True), {}),
}


# The others take minutes together.
QUICK = ("tf.data", "torch")


def train(name: str, strategy: Any, make: Any, options: Any, folder: Any, freq: int, *ends: Any):
    model = build(strategy)
    data = make()
    if "workers" in name:  # else Keras builds it with batches, and what was read ahead comes first
        model.test_on_batch(X[:BATCH_SIZE], Y[:BATCH_SIZE])
    backup = [] if folder is None else [sg.BackupAndRestore(folder, freq)]
    shuffle = {"shuffle": "workers" in name or "part" in name}
    history = model.fit(
        data, epochs=EPOCHS, verbose=0, callbacks=[*backup, *ends], **shuffle, **options
    )
    return values(model), history


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:.*shuffle=True. was passed")
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        *((name, "none") for name in QUICK),
        *(
            slow(name, "one" if name.startswith("Dataset") else "none")
            for name in SOURCES
            if name not in QUICK
        ),
        # Of replicas one group of batches is read ahead, and what it draws is drawn again.
        *(slow(name, "two") for name in ("PyDataset", "generator", "Dataset of arrays")),
    ],
)
def test_goes_on_with_the_next_batch(name, strategy, tmp_path) -> None:
    """In the second epoch, and once more in the third."""
    make, options = SOURCES[name]

    def run(*ends: Any, folder: Any = tmp_path / "backup") -> Any:
        return train(name, strategy_named(strategy), make, options, folder, 2, *ends)

    wanted, expected = run(folder=None)
    size = options.get("steps_per_epoch", NUM_BATCHES)
    got, history = ended_and_again(run, EndAt(size + 3), EndAt(size))
    assert_same(got, wanted)
    if strategy == "two":
        return
    assert history.history == expected.history
    table = next(one for one in wanted if one.shape == (NUM_BATCHES * EPOCHS, BATCH_SIZE))
    assert (table[: size + 3, 0] >= 0).all()


def test_data_that_end_before_the_backup_are_reported(tmp_path: Path) -> None:
    def fit(count: int, *ends: Any) -> None:
        data = ((X[:8], Y[:8]) for _ in range(count))
        callbacks = [sg.BackupAndRestore(tmp_path, 2), *ends]
        build(None).fit(data, steps_per_epoch=6, shuffle=False, verbose=0, callbacks=callbacks)

    with pytest.raises(AccidentError):
        fit(8, EndAt(5))
    for count in (3, 4):
        needed = max(4, count + 1)
        with pytest.raises(ValueError, match=f"ended after {count} batches, .* needs {needed}"):
            fit(count)


def test_passing_over_asks_for_no_row_where_it_can() -> None:
    asked: list[int] = []

    class Examples:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, number: int) -> Any:
            asked.append(number)
            return np.array([number])

    strategy = strategy_named("one")
    dataset = strategy.distribute_dataset(sg.input.Dataset(Examples(), batch_size=2))
    following = next(dataset.make_loader(0, None).host_batches(4))
    assert following.whole().ravel().tolist() == [8, 9]
    assert asked == [8, 9]


# `BackupAndRestore` on a notice: one backup, and the next program is the one never ended.


def fitted_until_notice(folder: Path, name: str, source: str, *callbacks: Any) -> Any:
    """What a program does that leaves at a notice; returns what is left in variables."""
    config = sg.TerminationConfig(exit_fn=leave, grace_period=0)
    backup = sg.BackupAndRestore(folder, termination_config=config)
    model = build(strategy_named(name))
    options = {"epochs": EPOCHS, "verbose": 0, "callbacks": [backup, *callbacks]}
    try:
        if source == "array":
            model.fit(X, Y, batch_size=BATCH_SIZE, **options)
        elif source == "dataset":
            model.fit(QuietRows(), **options)
        else:
            model.fit(generated(), steps_per_epoch=NUM_BATCHES - 1, shuffle=False, **options)
    finally:
        backup.stop_listening()
    return values(model)


class Notice(keras.callbacks.Callback):
    """Tells this process that its machine will be taken away, at step 0 before the first one."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if not self.step:
            signal.raise_signal(signal.SIGTERM)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.step -= 1
        if not self.step:
            signal.raise_signal(signal.SIGTERM)


def leave() -> None:
    raise AccidentError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source", "steps"),
    [
        ("none", "array", [NUM_BATCHES + 3]),
        ("two", "array", [2]),
        # Before the first step of a program, or of an epoch.
        ("two", "array", [3, 0, 0]),
        ("two", "generator", [NUM_BATCHES, 0, 0]),
        ("two", "dataset", [NUM_BATCHES + 1, 0, 0]),
    ],
)
def test_notice_leads_to_one_backup_and_the_next_program_goes_on(
    name: str, source: str, steps: list[int], tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    run = functools.partial(fitted_until_notice, tmp_path, name, source)
    for step in steps:
        with pytest.raises(AccidentError):
            run(Notice(step))
        assert len(list(tmp_path.glob("backup-*"))) == 1
    got = run()
    assert not tmp_path.exists()
    assert_same(got, run())  # the second one is not resumed
    assert signal.getsignal(signal.SIGTERM) is handler


def test_notice_saves_the_backup_and_nothing_else() -> None:
    with pytest.raises(ValueError, match="received a termination_config with a save_fn"):
        sg.BackupAndRestore(
            "runs/backup", termination_config=sg.TerminationConfig(save_fn=lambda: None)
        )


# A training whose state no longer fits into memory.


@pytest.mark.slow
def test_memory_without_room_is_warned_of_once_and_training_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(memory: Any, step: int) -> float:
        raise OSError(errno.ENOSPC, "No space left on device")

    def train(*callbacks: Any) -> Any:
        model = build(None)
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=list(callbacks))
        return values(model)

    wanted = train()
    monkeypatch.setenv("STRATAGEM_MEMORY_DIR", str(tmp_path / "memory"))
    monkeypatch.setattr(MemoryBackup, "save", save)
    words = r"(?s)can no longer be saved in .*memory: .*No space left.*resumes from .*disk"
    with pytest.warns(RuntimeWarning, match=words) as caught:
        got = train(sg.BackupAndRestore(tmp_path / "disk", memory_save_freq=1))
    assert sum("no longer be saved" in str(one.message) for one in caught) == 1
    assert_same(got, wanted)


def test_loss_of_another_process_is_no_lack_of_memory(tmp_path, monkeypatch) -> None:
    """UnavailableError is an OSError, and a save waits for the step, which needs all processes."""

    def save(memory: Any, step: int) -> float:
        raise sg.errors.UnavailableError("worker 1 has not answered for 9 s")

    monkeypatch.setenv("STRATAGEM_MEMORY_DIR", str(tmp_path / "memory"))
    monkeypatch.setattr(MemoryBackup, "save", save)
    backup = sg.BackupAndRestore(tmp_path / "disk", memory_save_freq=1)
    with pytest.raises(sg.errors.UnavailableError, match="worker 1 has not answered"):
        build(None).fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[backup])
