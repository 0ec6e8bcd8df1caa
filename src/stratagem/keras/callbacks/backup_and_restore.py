"""`BackupAndRestore`: backups of a running `fit`, resumed at the next batch after a restart."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import statistics
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import keras

from stratagem import environment
from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.in_memory import MemoryBackup
from stratagem.checkpoint.latest import run_on_first
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.objects import Stateful
from stratagem.checkpoint.preemption import PreemptionExit
from stratagem.checkpoint.saving import CheckpointOptions
from stratagem.checkpoint.storage.files import COMMIT_MARK
from stratagem.cluster.preemption.configuration import TerminationConfig
from stratagem.errors import DeadlineExceededError, UnavailableError, explain, invalid
from stratagem.group.current import current_group
from stratagem.input.batches import is_sparse
from stratagem.keras.callbacks.data_position import DataPosition
from stratagem.keras.numerics.random_state import Draws, RandomState, from_json, to_json
from stratagem.keras.private import ArrayDataAdapter, TFDatasetAdapter, set_initial_epoch
from stratagem.keras.training.active_fit import call_after_fit, epoch_iterator
from stratagem.keras.training.datasets import DatasetAdapter
from stratagem.keras.training.step_functions import TrainOrTestFunction
from stratagem.strategies.elastic import ElasticAdmission

# Interval between snapshots of `fit`'s state in memory.

AUTO = "auto"
_SHARE = 0.005
# Number of latest batches that a decision is based on, and of calls before the first.
_NUM_MEASURED = 16
# Calls between two decisions, at which all processes wait for each other.
_NUM_BETWEEN = 1000


class SnapshotInterval:
    """Selects the batches after which state is saved, the same on all processes.

    `num_batches` is the interval. "auto" limits saving to 0.5% of the training time: if saving
    takes as long as a step, a killed process loses 200 steps at most; if steps are long, one.
    """

    def __init__(self, num_batches: int | str) -> None:
        self._is_auto = num_batches == AUTO
        self.num_batches = 1 if self._is_auto else int(num_batches)
        self._num_waiting = self._num_calls = 0
        self._is_first = True
        self._mark_s: float | None = None
        self._batches_s: deque[float] = deque(maxlen=_NUM_MEASURED)
        self._costs_s: deque[float] = deque(maxlen=_NUM_MEASURED)

    def is_due(self, num_batches: int) -> bool:
        """Counts `num_batches` completed batches; returns True if a snapshot is due.

        Call it on every process.
        """
        now_s = time.monotonic()
        if self._mark_s is not None:
            self._batches_s.append((now_s - self._mark_s) / num_batches)
        self._mark_s = now_s
        self._num_waiting += num_batches
        self._num_calls += 1
        if self._is_first and self._num_calls == _NUM_MEASURED:
            self._agree()
        is_due = self._num_waiting >= self.num_batches
        if is_due:
            self._num_waiting = 0
        return is_due

    def note(self, cost_s: float) -> None:
        """Records a snapshot that took `cost_s` seconds."""
        self._costs_s.append(cost_s)
        if self._mark_s is not None:
            self._mark_s += cost_s

    def end_epoch(self) -> None:
        """Resets the count after the snapshot of an epoch's end; may choose a new interval.

        Call it on every process.
        """
        self._num_waiting, self._mark_s = 0, None
        if self._num_calls >= _NUM_BETWEEN:
            self._agree()

    def _agree(self) -> None:
        self._is_first, self._num_calls = False, 0
        if not self._is_auto:
            return
        own = 1
        if self._batches_s and self._costs_s:
            batch_s, cost_s = map(statistics.median, (self._batches_s, self._costs_s))
            own = max(1, math.ceil(cost_s / (_SHARE * batch_s))) if batch_s > 0 else 1
        group = current_group()
        # The longest interval applies to all.
        everyone = [own] if group is None else group.exchange("BackupAndRestore's pace", own)
        self.num_batches = max(everyone)


# State of callbacks outside of variables, as JSON.

# Attributes that Keras's callbacks carry from epoch to epoch.
_ATTRIBUTES: tuple[tuple[type, tuple[str, ...]], ...] = (
    (
        keras.callbacks.EarlyStopping,
        ("best", "best_epoch", "best_weights", "stopped_epoch", "wait"),
    ),
    (keras.callbacks.ReduceLROnPlateau, ("best", "cooldown_counter", "wait")),
    (keras.callbacks.ModelCheckpoint, ("best",)),
    (keras.callbacks.History, ("epoch", "history")),
)


def callback_states(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Returns the JSON states of callbacks, by class name and number within the class.

    The state is `get_state()` if the callback has it, and selected attributes for Keras's
    callbacks.
    """
    return {name: to_json(_state(callback)) for name, callback in _named(callbacks)}


def set_callback_states(callbacks: Sequence[Any], states: Mapping[str, Any]) -> None:
    """Restores `callback_states`; callbacks without an entry stay unchanged."""
    for name, callback in _named(callbacks):
        if name not in states:
            continue
        state = from_json(states[name])
        if isinstance(callback, Stateful):
            callback.set_state(state)
        else:
            vars(callback).update(state)


def _state(callback: keras.callbacks.Callback) -> Any:
    if isinstance(callback, Stateful):
        return callback.get_state()
    return {name: getattr(callback, name) for name in _attributes(callback)}


def _named(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    counts: dict[str, int] = {}
    for callback in callbacks:
        if isinstance(callback, Stateful) or _attributes(callback):
            kind = type(callback).__name__
            counts[kind] = counts.get(kind, 0) + 1
            yield f"{kind} {counts[kind]}", callback


def _attributes(callback: keras.callbacks.Callback) -> list[str]:
    """Returns the attributes to save that exist in this Keras version, after `on_train_begin`."""
    return [
        name
        for kind, names in _ATTRIBUTES
        if isinstance(callback, kind)
        for name in names
        if hasattr(callback, name)
    ]


# Position of a `fit`: epoch, batch, data, random state, and the states of callbacks.


class FitPosition:
    """Position of one `fit`, which another process can continue from.

    `callbacks` are those whose states belong to it.
    """

    def __init__(self, data: DataPosition, callbacks: Sequence[Any]) -> None:
        self.data = data
        self._callbacks = callbacks

    def state(self, model: Any, epoch: int, batch: int, *, is_within: bool) -> dict[str, Any]:
        """Returns the position as JSON, after `batch` batches of an epoch.

        `is_within` is False between epochs, where `batch` is 0.
        """
        now = Draws.now()
        return {
            "epoch": epoch,
            "batch": batch,
            "is_stopped": bool(model.stop_training),
            "data": self.data.state(batch, now, is_within=is_within),
            "random": RandomState.state_with(now),
            "callbacks": callback_states(self._callbacks),
        }

    def go_to(self, model: Any, num_epochs: int, state: Mapping[str, Any]) -> None:
        """Makes the active `fit` begin at a position; call it in `on_train_begin`."""
        # A training stopped by a callback has no epochs left.
        set_initial_epoch(model, num_epochs if state["is_stopped"] else state["epoch"])
        self.data.go_to(state["data"], state["batch"])
        self.set_state(state)

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restores the random state and the states of callbacks."""
        set_callback_states(self._callbacks, state["callbacks"])
        RandomState().set_state(state["random"])


# State of one `fit` that `BackupAndRestore` backs up.


class BackupProgress:
    """Checkpointed state of a training outside its variables."""

    def __init__(self) -> None:
        self.current: Callable[[], dict[str, Any]] = dict
        self.restored: dict[str, Any] = {}

    def get_state(self) -> dict[str, Any]:
        """Returns the current state."""
        return self.current()

    def set_state(self, state: dict[str, Any]) -> None:
        """Stores a restored state."""
        self.restored = state


@dataclasses.dataclass(frozen=True)
class BackupRun:
    """Backups of one `fit`, and the state that they hold.

    `memory` is None if nothing is saved in memory, and `leaving` if notices are ignored.
    """

    manager: CheckpointManager
    memory: MemoryBackup | None
    interval: SnapshotInterval
    leaving: PreemptionExit | None
    progress: BackupProgress
    position: FitPosition

    def restore(self) -> Callable[[], object] | None:
        """Restores the newest state; returns a function that restores it again, or None if none."""
        manager, memory = self.manager, self.memory
        if memory is not None and memory.restore() is not None:
            return memory.restore
        path = manager.restore_or_initialize(skip_damaged=True)
        if path is None:
            return None
        exactly = CheckpointOptions(restore_components=True)
        return lambda: manager.checkpoint.restore(path, exactly)


_NAME = "backup"


class BackupAndRestore(keras.callbacks.Callback):
    """Resumes an interrupted `fit` at its next batch.

    It saves weights, optimizer, metrics, seeds, random state, position in the data, `History` and
    the state of other callbacks in a folder. A program restarted with the same callback restores
    them when `fit` begins, and ends with the weights of an uninterrupted training. With several
    processes, pass it on all. It runs after all other callbacks.

    If `STRATAGEM_MEMORY_DIR` names a folder in memory, as `stratagem launch` with restarts sets it,
    the state is also saved there, as often as 0.5% of the training time allows: after each batch if
    batches are long, after a few if they are short.

    Args:
        backup_dir: the folder, for this `fit` alone; several machines must share it.
        save_freq: "epoch", or the number of batches between backups.
        double_checkpoint: True keeps two backups. If the newer one is damaged, `fit` resumes from
            the older one.
        delete_checkpoint: True deletes the backups when `fit` ends without an error.
        memory_save_freq: number of batches between saves in memory, besides those at the end of
            each epoch. With 1 a killed process loses one batch at most; "auto" saves as often as
            0.5% of the time allows.
        termination_config: preemption notices to act on: after a notice to any process, all save
            after the same batch and exit. None ignores notices.
        options: options for writing backups to disk. With `enable_async` training continues
            meanwhile, except for the backup after a notice.

    Raises:
        ValueError: an empty `backup_dir`, an invalid frequency, or a `termination_config` with a
            `save_fn`.

    Example:
        >>> import tempfile
        >>> def train(folder, *callbacks):
        ...     keras.utils.set_random_seed(1)
        ...     model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        ...     model.compile("adam", "mse")
        ...     backup = sg.BackupAndRestore(folder, save_freq=1)
        ...     data = {"x": np.ones((12, 2)), "y": np.ones(12), "batch_size": 4}
        ...     model.fit(**data, epochs=2, verbose=0, callbacks=[backup, *callbacks])
        ...     return np.array(model.weights[0].value)
        >>> class Accident(keras.callbacks.Callback):
        ...     def on_train_batch_begin(self, batch, logs=None):
        ...         if self.model.optimizer.iterations == 4:
        ...             raise OSError
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     try:
        ...         train(folder, Accident())
        ...     except OSError:
        ...         again = train(folder)
        ...     bool(np.all(again == train(folder)))
        True

    Source: Keras 3.15 callbacks/backup_and_restore.py, which resumes at the epoch.
    """

    # Read by this package: called after other callbacks, without batch logs.
    runs_last = True
    needs_batch_logs = False

    def __init__(
        self,
        backup_dir: str | os.PathLike[str],
        save_freq: str | int = "epoch",
        double_checkpoint: bool = False,
        delete_checkpoint: bool = True,
        *,
        memory_save_freq: str | int = AUTO,
        termination_config: TerminationConfig | None = None,
        options: CheckpointOptions | None = None,
    ) -> None:
        super().__init__()
        _check(backup_dir, save_freq, memory_save_freq)
        if termination_config is not None and termination_config.save_fn is not None:
            raise invalid(
                "BackupAndRestore received a termination_config with a save_fn.",
                expected="no save_fn: on notice the callback saves its own backup.",
                fix="omit save_fn, or use sg.PreemptionCheckpointHandler in a custom loop.",
            )
        self.backup_dir = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint = double_checkpoint
        self.delete_checkpoint = delete_checkpoint
        self.memory_save_freq = memory_save_freq
        self.termination_config = termination_config
        self.options = options
        self.callback_list: Any = None  # Keras's list of all callbacks
        self._run: BackupRun | None = None
        self._restored: tuple[Callable[[], object], Mapping[str, Any]] | None = None
        self._epoch = 0
        self._batch = 0  # completed in this epoch
        self._num_unsaved = self._num_done = 0
        self._memory_dir = environment.lookup("STRATAGEM_MEMORY_DIR")
        self.awaits_steps = self._memory_dir is not None
        # Set only if needed: Keras waits for each step if a callback has these methods.
        if save_freq != "epoch" or self._memory_dir or termination_config is not None:
            vars(self)["on_train_batch_end"] = self._on_train_batch_end
        if termination_config is not None:
            vars(self)["on_train_batch_begin"] = self._on_train_batch_begin

    def on_train_begin(self, logs: object = None) -> None:
        """Restores the newest undamaged backup, if any."""
        model, iterator = self._synchronised_model(), epoch_iterator()
        if not model.built:
            raise invalid(
                f"Model {model.name!r} is not built.",
                expected="a model with variables to back up.",
                fix="call it on a batch of data first, or begin with an Input layer.",
                code="SG705",
            )
        if iterator is None or self.callback_list is None:
            raise RuntimeError(
                explain(
                    "BackupAndRestore was called outside of fit.",
                    expected="a call by Keras's own fit.",
                    fix="use sg.train.CheckpointManager in a custom loop.",
                )
            )
        progress = BackupProgress()
        checkpoint = Checkpoint(model=model, progress=progress)
        manager = CheckpointManager(
            checkpoint,
            self.backup_dir,
            max_to_keep=2 if self.double_checkpoint else 1,
            checkpoint_name=_NAME,
        )
        memory = None
        if self._memory_dir is not None:
            memory = MemoryBackup(checkpoint, self._memory_dir, _name_in_memory(self.backup_dir))
        callbacks = self.callback_list.callbacks
        others = [one for one in callbacks if not isinstance(one, BackupAndRestore)]
        leaving = None
        if self.termination_config is not None:
            leaving = PreemptionExit(self.termination_config, manager, type(self).__name__)
        position = FitPosition(DataPosition.of(iterator), others)
        interval = SnapshotInterval(self.memory_save_freq)
        self._run = BackupRun(manager, memory, interval, leaving, progress, position)
        self._num_unsaved = self._num_done = 0
        restore = self._run.restore()
        self._restored = None if restore is None else (restore, progress.restored)
        if restore is not None:
            self._num_done = progress.restored["num_done"]
            params: Any = self.params
            position.go_to(self.model, params["epochs"], progress.restored)
        if self.options is not None and self.options.is_async:
            with contextlib.suppress(ValueError):  # variables that are created later
                checkpoint.prepare()

    def _synchronised_model(self) -> Any:
        """Returns the model; Keras updates its variables when this attribute is read."""
        return self.model

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """In the resumed epoch, undoes the changes by Keras and other callbacks at its start."""
        assert self._run is not None
        restored, self._restored = self._restored, None
        self._epoch, self._batch = epoch, 0
        if restored is None:
            return
        restore, state = restored
        set_initial_epoch(self.model, None)
        if state["data"]["is_within"]:
            restore()
            self._batch = state["batch"]
            self._run.position.set_state(state)

    def _on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        assert self._run is not None
        assert self._run.leaving is not None
        self._run.leaving.before_step(self._num_done, self._save_on_notice)

    def _save_on_notice(self) -> bool:
        self._save(self._epoch, self._batch, in_memory=True, on_disk=True)
        return True

    def _on_train_batch_end(self, batch: int, logs: object = None) -> None:
        assert self._run is not None
        num_batches = batch + 1 - self._batch
        self._num_unsaved += num_batches
        self._num_done += num_batches
        self._batch = batch + 1
        on_disk = self.save_freq != "epoch" and self._num_unsaved >= int(self.save_freq)
        # Called on every process, even one whose memory was full, so that all agree.
        in_memory = self._memory_dir is not None and self._run.interval.is_due(num_batches)
        # An epoch without more batches is saved in on_epoch_end, after validation.
        if (on_disk or in_memory) and self._run.position.data.has_more(self._batch):
            self._save(
                self._epoch,
                self._batch,
                in_memory=in_memory,
                on_disk=on_disk,
                options=self.options,
            )

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Saves a backup if one is due."""
        is_due = self.save_freq == "epoch" or self._num_unsaved >= int(self.save_freq)
        self._num_done += 1  # its state differs from that after the last batch
        if is_due or self._memory_dir is not None:
            self._save(
                epoch + 1,
                0,
                is_within=False,
                in_memory=True,
                on_disk=is_due,
                options=self.options,
            )
        assert self._run is not None
        if self._memory_dir is not None:
            self._run.interval.end_epoch()

    def _save(
        self,
        epoch: int,
        batch: int,
        *,
        in_memory: bool,
        on_disk: bool,
        is_within: bool = True,
        options: CheckpointOptions | None = None,
    ) -> None:
        assert self._run is not None
        run, model = self._run, self._synchronised_model()

        def progress() -> dict[str, Any]:
            state = run.position.state(model, epoch, batch, is_within=is_within)
            return {"num_done": self._num_done, **state}

        run.progress.current = progress
        if in_memory and run.memory is not None:
            self._save_in_memory(run.memory)
        if on_disk:
            run.manager.save(options=options)
            self._num_unsaved = 0

    def _save_in_memory(self, memory: MemoryBackup) -> None:
        """Saves in memory; without space, warns and trains on with backups on disk only."""
        assert self._run is not None
        try:
            self._run.interval.note(memory.save(self._num_done))
        except (UnavailableError, DeadlineExceededError):  # of another process, not of the memory
            raise
        except OSError as error:
            warnings.warn(
                explain(
                    f"The state can no longer be saved in {self._memory_dir}: {error}.",
                    expected="a folder in memory with room for the state of this process.",
                    fix=f"free memory there. A restart now resumes from {self.backup_dir}.",
                ),
                RuntimeWarning,
                stacklevel=2,
            )
            memory.forget()
            self._run = dataclasses.replace(self._run, memory=None)

    def on_train_end(self, logs: object = None) -> None:
        """Waits for pending writes, then deletes the backups unless they are kept."""
        if self._restored is not None:  # no epoch was left to run
            set_initial_epoch(self.model, None)
        run = self._run
        self.stop_listening()
        self._run = self._restored = None
        if run is not None:
            run.manager.sync()
        if self.delete_checkpoint:
            if run is not None and run.memory is not None:
                run.memory.forget()
            run_on_first("BackupAndRestore.on_train_end", self._delete)

    def stop_listening(self) -> None:
        """Ignores further notices, in a program that continues after `fit` has raised."""
        if self._run is not None and self._run.leaving is not None:
            self._run.leaving.stop()

    def _delete(self) -> None:
        folder = Path(self.backup_dir)
        for path in sorted(folder.glob(f"{_NAME}-*")):
            (path / COMMIT_MARK).unlink(missing_ok=True)  # the backup now counts as incomplete
            shutil.rmtree(path, ignore_errors=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _name_in_memory(backup_dir: str) -> str:
    return f"backup-{zlib.crc32(os.path.abspath(backup_dir).encode()):08x}"


def _check(backup_dir: object, save_freq: object, memory_save_freq: object) -> None:
    if not backup_dir:
        raise invalid(
            f"backup_dir={backup_dir!r} is empty.",
            expected="the path of a folder for this fit alone.",
            fix="pass a folder that survives a restart, on a disk that all machines share.",
        )
    if save_freq != "epoch" and not _is_count(save_freq):
        raise invalid(
            f"save_freq={save_freq!r} is not valid.",
            expected='"epoch", or a number of batches of at least 1.',
            fix="pass a number of batches, or omit save_freq to save after each epoch.",
        )
    if memory_save_freq != AUTO and not _is_count(memory_save_freq):
        raise invalid(
            f"memory_save_freq={memory_save_freq!r} is not valid.",
            expected=f'"{AUTO}", or a number of batches of at least 1.',
            fix="pass 1 to save after each batch, or omit memory_save_freq.",
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# `fit` of processes that others can join, and that can join others.


_FitState = dict[str, Any]


class JoiningFit(keras.callbacks.Callback):
    """Admits processes before each batch. In a process that joins, `fit` begins at their batch."""

    runs_last = True
    needs_batch_logs = False

    def __init__(self, admission: ElasticAdmission) -> None:
        super().__init__()
        self._admission = admission
        self.callback_list: Any = None  # Keras's list of all callbacks
        self._place = ""
        self._position: FitPosition | None = None
        self._received: _FitState | None = None
        self._epoch = self._batch = 0  # batches completed in this epoch
        self._may_retry = True

    def on_train_begin(self, logs: object = None) -> None:
        """Joins the others, if they train already."""
        model: Any = self.model
        self._may_retry = model.steps_per_execution == 1
        others = [one for one in self.callback_list.callbacks if one is not self]
        iterator = epoch_iterator()
        self._place = self._admission.begin_call()
        self._received = None
        call_after_fit(self._admission.end_place)
        if not self._admission.is_waiting:
            self._position = FitPosition(DataPosition.of(iterator), others)
            return
        batches = _sample_batches(iterator.data_adapter)
        self._position = FitPosition(DataPosition.of(iterator), others)
        params: Any = self.params
        state = self._admission.join(self._place, lambda: _compile(model, batches))
        if state is None:
            set_initial_epoch(model, params["epochs"])
            return
        self._position.go_to(model, params["epochs"], state)
        self._received = state

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """In the first epoch after joining, undoes the changes at its start."""
        self._epoch, self._batch = epoch, 0
        received, self._received = self._received, None
        if received is None:
            return
        set_initial_epoch(self.model, None)
        self._admission.restore()
        self._batch = received["batch"]
        assert self._position is not None
        self._position.set_state(received)

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Admits processes that wait."""
        self._admission.admit(self._place, self._state, may_retry=self._may_retry)

    def _state(self) -> _FitState:
        assert self._position is not None
        return self._position.state(self.model, self._epoch, self._batch, is_within=True)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Counts batches."""
        self._batch = batch + 1

    def on_train_end(self, logs: object = None) -> None:
        """Ends a call that was skipped."""
        set_initial_epoch(self.model, None)


def _sample_batches(adapter: Any) -> list[Any]:
    """Returns a batch for its shapes, and one as short as the last of an epoch, if that is known.

    Returns none if reading them would change those that follow.
    """
    is_harmless = isinstance(adapter, ArrayDataAdapter | TFDatasetAdapter) or (
        isinstance(adapter, DatasetAdapter) and adapter.can_go_to
    )
    if not is_harmless:
        return []
    before = RandomState().get_state()
    try:
        batches: Any = iter(adapter.get_jax_iterator())
        batch = next(batches, None)
        with contextlib.suppress(AttributeError):  # optional in iterators
            batches.close()
    finally:
        RandomState().set_state(before)
    if batch is None:
        return []
    size = adapter.partial_batch_size
    if size is None:
        return [batch]
    return [batch, jax.tree.map(lambda array: array[:size], batch, is_leaf=is_sparse)]


def _compile(model: Any, batches: Sequence[Any]) -> None:
    """Compiles the step of training for the expected number of members."""
    if isinstance(model.train_function, TrainOrTestFunction):
        for batch in batches:
            model.train_function.compile_ahead(batch)
