"""`keras.callbacks.TensorBoard` without TensorFlow, for every strategy; profiles of steps."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import keras
import numpy as np
from rich.console import Console
from rich.text import Text

from stratagem import environment
from stratagem.environment import load
from stratagem.errors import check_number, explain, invalid
from stratagem.execution import summary
from stratagem.keras.training.active_fit import call_after_fit
from stratagem.keras.training.model import observe_steps, strategy_of
from stratagem.observe.profiling import ProfileSummary, show_profile
from stratagem.observe.recorder import StepRecorder, observe
from stratagem.resources import checked_folder

# TensorBoard summaries of a model: weights, embeddings, and the graph of layers.


def write_weights(model: keras.Model, epoch: int, *, with_images: bool) -> None:
    """Writes a histogram of each weight, and optionally an image, to the default writer.

    Call it on every process: they gather sharded weights together.
    """
    for layer in model.layers:
        for weight in layer.weights:
            value: Any = keras.ops.convert_to_numpy(weight)
            tag = weight.path.replace(":", "_")
            summary.histogram(f"{tag}/histogram", value, step=epoch)
            images = _as_images(value) if with_images else None
            if images is not None:
                summary.image(f"{tag}/image", images, step=epoch)


def _as_images(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Returns a weight as images, as Keras shows it; None if it cannot be shown."""
    value = np.squeeze(value).astype(np.float32)
    if value.ndim == 1:
        return value[None, :, None, None]
    if value.ndim == 2:
        return (value.T if value.shape[0] > value.shape[1] else value)[None, :, :, None]
    if value.ndim == 3:  # every convolution kernel is an image
        if keras.config.image_data_format() == "channels_last":
            value = np.transpose(value, (2, 0, 1))
        return value[..., None]
    return value if value.ndim == 4 and value.shape[-1] in (1, 3, 4) else None


def write_conceptual_graph(model: keras.Model) -> None:
    """Writes the layers of a functional or sequential model to the default writer."""
    if not isinstance(model, keras.Sequential) and type(model).__name__ != "Functional":
        return
    messages = load(
        "tensorboard.compat.proto.summary_pb2",
        needed_by="sg.TensorBoard",
        install="stratagem[observe]",
    )
    metadata = messages.SummaryMetadata()
    metadata.plugin_data.plugin_name = "graph_keras_model"
    metadata.plugin_data.content = b"1"
    summary.write("keras", model.to_json(), step=0, metadata=metadata)


def write_projector_configuration(
    model: keras.Model,
    writer: summary.SummaryWriter,
    log_dir: str,
    labels: str | Mapping[str, str] | None,
) -> None:
    """Writes the projector configuration, with the future paths of a model's embeddings.

    `labels` is the file with the labels of rows, or a mapping of layer names to files; a layer that
    is not an embedding raises a ValueError.
    """
    names = [layer.name for layer in _embeddings(model)]
    if isinstance(labels, Mapping) and (unknown := sorted(set(labels) - set(names))):
        raise invalid(
            f"embeddings_metadata names layers that are not embeddings: {unknown}.",
            expected=f"names of keras.layers.Embedding layers: {names}.",
            fix="look up the name with layer.name.",
        )
    lines: list[str] = []
    for name in names:
        label = labels.get(name) if isinstance(labels, Mapping) else labels
        lines += ["embeddings {", f'  tensor_name: "{name}"', f'  tensor_path: "{name}.tsv"']
        lines += [f'  metadata_path: "{label}"'] if label else []
        lines.append("}")
    if writer.is_active:
        os.makedirs(log_dir, exist_ok=True)
        path = os.path.join(log_dir, "projector_config.pbtxt")
        with open(path, "w", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]))


def write_embeddings(model: keras.Model, writer: summary.SummaryWriter, log_dir: str) -> None:
    """Writes the embedding tables of a model for TensorBoard's projector.

    Call it on every process; `writer` writes on the chief only.
    """
    for layer in _embeddings(model):
        table = np.asarray(keras.ops.convert_to_numpy(layer.embeddings), np.float32)
        if writer.is_active:
            np.savetxt(os.path.join(log_dir, f"{layer.name}.tsv"), table, "%.6g", delimiter="\t")


def _embeddings(model: keras.Model) -> Iterator[Any]:
    return (layer for layer in model.layers if isinstance(layer, keras.layers.Embedding))


class TensorBoard(keras.callbacks.Callback):
    """Writes losses, metrics and weights of `fit` and `evaluate` for TensorBoard.

    Pass it to `fit`; it needs no TensorFlow. It writes training to the folder `train` and
    validation to `validation`, under the tags of Keras's own callback. Batch steps are counted by
    `optimizer.iterations` and continue in a second `fit`. Unless `update_freq` is "epoch",
    `sg.summary.scalar` and the like in layers and in `train_step` write to the same folders, every
    `update_freq` steps. With several processes, pass it on all; the chief writes. Under a
    ParameterServerStrategy, summaries of layers are not written, because layers run in other
    processes. Needs `stratagem[observe]`.

    Args:
        log_dir: the folder.
        histogram_freq: epochs between histograms of all weights; 0 for none.
        write_graph: True writes the model's layers for the graph page.
        write_images: True writes weights as images along with their histograms.
        write_steps_per_second: True writes the training speed.
        update_freq: "epoch", "batch", or the number of batches between writes of the loss and
            metrics; with `steps_per_execution`, after the call in which that number is reached.
        profile_batch: a batch, counted from 1, or a pair of the first and last batch to profile
            with `jax.profiler`; 0 for none.
        embeddings_freq: epochs between writes of the tables of `Embedding` layers for the projector
            page; 0 for none.
        embeddings_metadata: the file with the labels of the rows, or a mapping of layer names to
            files.

    Raises:
        ValueError: an empty `log_dir`, a negative frequency, an unknown word, an invalid range of
            batches, or (when training begins) the name of a layer that is not an embedding.

    Example:
        >>> import pathlib, tempfile
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     history = model.fit(np.ones((4, 1)), np.ones((4, 1)), verbose=0,
        ...                         callbacks=[sg.TensorBoard(folder)])
        ...     [one.name for one in pathlib.Path(folder).iterdir()]
        ['train']

    Source: Keras 3.15 callbacks/tensorboard.py, TensorBoard.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str] = "logs",
        histogram_freq: int = 0,
        write_graph: bool = False,
        write_images: bool = False,
        write_steps_per_second: bool = False,
        update_freq: str | int = "epoch",
        profile_batch: int | str | Sequence[int] = 0,
        embeddings_freq: int = 0,
        embeddings_metadata: str | Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        self.log_dir = checked_folder("log_dir", log_dir)
        check_number(
            "sg.TensorBoard", 0, histogram_freq=histogram_freq, embeddings_freq=embeddings_freq
        )
        self.histogram_freq = histogram_freq
        self.write_graph = write_graph
        self.write_images = write_images
        self.write_steps_per_second = write_steps_per_second
        self.update_freq = _steps_between(update_freq)
        self.embeddings_freq = embeddings_freq
        self.embeddings_metadata = embeddings_metadata
        self._profiled = _range_of_batches(profile_batch)
        self._is_profiling = False
        self._writers: dict[str, summary.SummaryWriter] = {}
        self._defaults: list[contextlib.ExitStack] = []
        self._num_steps, self._num_steps_before_epoch, self._num_test_steps = 0, 0, 0
        self._is_training, self._counts_in_step = False, True
        self._epoch_began_s, self._batch_began_s = 0.0, 0.0

    @property
    def needs_batch_logs(self) -> bool:
        """True if it reads the logs of single batches."""
        return self.update_freq is not None or self._profiled is not None

    def set_model(self, model: keras.Model) -> None:
        """Opens new files; Keras calls it before training and evaluation."""
        super().set_model(model)
        self._writers = {}
        if self.embeddings_freq:
            write_projector_configuration(
                model, self._writer("train"), self.log_dir, self.embeddings_metadata
            )
        if self.write_graph:
            with self._writer("train").as_default():
                write_conceptual_graph(model)

    def _writer(self, name: str) -> summary.SummaryWriter:
        if name not in self._writers:
            folder = os.path.join(self.log_dir, name)
            self._writers[name] = summary.create_file_writer(folder)
        return self._writers[name]

    def _close_writers(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _push_default(self, name: str, step: _NextStep | int) -> None:
        """Makes a writer the default for summaries in layers, at the steps to write."""
        stack = contextlib.ExitStack()
        self._defaults.append(stack)
        every = self.update_freq
        if every is None:
            return
        stack.enter_context(self._writer(name).as_default(step))
        stack.enter_context(summary.record_if(lambda: _value(step) % every == 0))

    def _pop_default(self) -> None:
        if self._defaults:
            self._defaults.pop().close()

    def on_train_begin(self, logs: object = None) -> None:
        """Makes the train folder the default for summaries in layers."""
        self._is_training = True
        self._num_steps = self._iterations()
        # A step number known before the call avoids a branch in the program. Without a strategy,
        # Keras's own step does not contain the optimizer's counter.
        model: Any = self.model
        several = model.steps_per_execution > 1
        self._counts_in_step = several and strategy_of(model) is not None
        step = _NextStep(self._optimizer) if self._counts_in_step else self._num_steps
        self._push_default("train", step)

    def on_train_end(self, logs: object = None) -> None:
        """Closes the files."""
        self._pop_default()
        if self._is_profiling:
            self._stop_profiler(logs)
        self._is_training = False
        self._close_writers()

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Records the start time of the epoch."""
        self._num_steps_before_epoch = self._num_steps
        self._epoch_began_s = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        """Starts the profiler before the first batch to profile."""
        self._batch_began_s = time.perf_counter()
        first = self._num_steps_before_epoch + batch + 1
        if not self._counts_in_step:
            self._pop_default()
            self._push_default("train", first)
        is_first = self._profiled is not None and first >= self._profiled[0]
        if is_first and not self._is_profiling and self._writer("train").is_active:
            jax.profiler.start_trace(os.path.join(self.log_dir, "train"))
            self._is_profiling = True

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        """Writes the logs of a batch every `update_freq` batches."""
        before, self._num_steps = self._num_steps, self._num_steps_before_epoch + batch + 1
        if self._is_profiling and self._profiled and self._num_steps >= self._profiled[1]:
            self._stop_profiler(logs)
        if self.update_freq is None or self._num_steps // self.update_freq == (
            before // self.update_freq
        ):
            return
        values = {f"batch_{name}": value for name, value in _named(logs).items()}
        if self.write_steps_per_second:
            elapsed_s = time.perf_counter() - self._batch_began_s
            if elapsed_s > 0:  # some clocks move in steps of 10 ms and more
                values["batch_steps_per_second"] = (self._num_steps - before) / elapsed_s
        self._write("train", values, self._num_steps)

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Writes the logs of an epoch, and weights at the chosen frequency."""
        values = _named(logs)
        of_training = {k: v for k, v in values.items() if not k.startswith("val_")}
        if values:
            of_training |= _learning_rates(self._optimizer)
        if self.write_steps_per_second:
            elapsed_s = time.perf_counter() - self._epoch_began_s
            num_steps = self._num_steps - self._num_steps_before_epoch
            if elapsed_s > 0:
                of_training["steps_per_second"] = num_steps / elapsed_s
        of_validation = {k[4:]: v for k, v in values.items() if k.startswith("val_")}
        for folder, chosen in (("train", of_training), ("validation", of_validation)):
            if chosen:
                self._write(folder, {f"epoch_{k}": v for k, v in chosen.items()}, epoch)
        model: Any = self.model
        if self.histogram_freq and epoch % self.histogram_freq == 0:
            with self._writer("train").as_default(), summary.record_if(condition=True):
                write_weights(model, epoch, with_images=self.write_images)
        if self.embeddings_freq and epoch % self.embeddings_freq == 0:
            write_embeddings(model, self._writer("train"), self.log_dir)

    def on_test_begin(self, logs: object = None) -> None:
        """Makes the validation folder the default for summaries in layers."""
        self._num_test_steps = 0
        self._push_default("validation", 0)

    def on_test_batch_begin(self, batch: int, logs: object = None) -> None:
        """Counts batches for summaries in layers."""
        self._num_test_steps = batch + 1
        self._pop_default()
        self._push_default("validation", self._num_test_steps)

    def on_test_end(self, logs: object = None) -> None:
        """Writes the logs of an evaluation at the current training step."""
        self._pop_default()
        if self._optimizer is not None:
            values = {f"evaluation_{k}_vs_iterations": v for k, v in _named(logs).items()}
            self._write("validation", values, self._iterations())
        if not self._is_training:
            self._close_writers()

    def _write(self, folder: str, values: Mapping[str, Any], step: int) -> None:
        with self._writer(folder).as_default(), summary.record_if(condition=True):
            for name, value in values.items():
                summary.scalar(name, np.asarray(value), step=step)

    @property
    def _optimizer(self) -> Any:
        return getattr(self.model, "optimizer", None)

    def _iterations(self) -> int:
        if self._optimizer is None:
            return 0
        iterations: Any = keras.ops.convert_to_numpy(self._optimizer.iterations)
        return int(iterations)

    def _stop_profiler(self, logs: object) -> None:
        jax.block_until_ready(list(_named(logs).values()))
        jax.profiler.stop_trace()
        self._is_profiling, self._profiled = False, None


class _NextStep:
    """The number of the current training step, counted from 1; default step of summaries."""

    def __init__(self, optimizer: keras.optimizers.Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def value(self) -> Any:
        """One more than the completed steps; traced in a compiled step."""
        iterations = _value(self._optimizer.iterations)
        return iterations + jax.numpy.ones((), iterations.dtype)


def _value(step: object) -> Any:
    return getattr(step, "value", step)


def _named(logs: object) -> dict[str, Any]:
    """Returns logs by name; a custom `train_step` may return anything."""
    return dict(logs) if isinstance(logs, Mapping) else {}


def _learning_rates(optimizer: keras.optimizers.Optimizer | None) -> dict[str, Any]:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if inner is None:
        return {}
    return {"learning_rate": keras.ops.convert_to_numpy(inner.learning_rate)}


def _steps_between(update_freq: str | int) -> int | None:
    """Returns the number of batches between writes; None for writes after epochs only."""
    if update_freq == "epoch":
        return None
    steps = 1 if update_freq == "batch" else update_freq
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise invalid(
            f"sg.TensorBoard received update_freq={update_freq!r}.",
            expected='"epoch", "batch" or a number of batches of at least 1.',
            fix='pass "epoch" to write after each epoch.',
        )
    return steps


def _range_of_batches(profile_batch: int | str | Sequence[int]) -> tuple[int, int] | None:
    """Returns the first and last batch to profile, or None."""
    try:
        parts = profile_batch.split(",") if isinstance(profile_batch, str) else profile_batch
        pair = (parts,) if isinstance(parts, int) else tuple(parts)
        first, last = (int(batch) for batch in (pair * 2 if len(pair) == 1 else pair))
    except (TypeError, ValueError):
        first, last = -1, -1
    if (first, last) == (0, 0):
        return None
    if first < 1 or last < first:
        raise invalid(
            f"sg.TensorBoard received profile_batch={profile_batch!r}.",
            expected="a batch counted from 1, a pair of the first and last batch, or 0.",
            fix="pass profile_batch=(10, 20), for example.",
        )
    return first, last


def profile(
    steps: tuple[int, int] = (10, 20),
    folder: str | os.PathLike[str] | None = None,
    *,
    workers: Sequence[int] = (0,),
    top: int = 10,
    verbose: bool = True,
) -> StepProfile:
    """Profiles training steps: writes a trace, and prints what their time is spent on.

    Use it as a context manager around a training loop, or as a callback of `fit`. Steps are counted
    in this process: those of `fit`, and calls of `strategy.run` and `run_steps` that change a
    trainable variable. With several steps per call, the profile starts and ends between
    two calls.

    Args:
        steps: the profile starts when the first number of steps is done, and ends when the second
            one is. The first step compiles, so start later.
        folder: folder for the trace, with one folder per worker in it; None for `profile` in the
            run folder `STRATAGEM_RUN_DIR`, or else in the current one.
        workers: ids of the processes to profile; all processes may call this.
        top: number of operations to print.
        verbose: True prints the summary.

    Returns:
        The profile. Its attribute `trace` is the path of the trace, and `summary` has the figures,
        or is None before the last step: `num_steps`, `num_devices`, `step_s`, `busy_share`,
        `share(part)` of "compute", "collectives", "copies", "input" or "host", `operations`, and
        `to_dict()`.

    Raises:
        TypeError: `steps` or `workers` are not integers.
        ValueError: `steps` end before they start, a worker does not exist (when training begins),
            or `folder` is empty.
        OSError: the folder cannot be written (when training begins).
        RuntimeError: another profile is active (when training begins).

    Example:
        >>> import tempfile
        >>> model = keras.Sequential([keras.layers.Dense(1)])
        >>> model.compile("sgd", "mse")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with sg.profile(steps=(1, 3), folder=folder, verbose=False) as profile:
        ...         history = model.fit(np.ones((8, 1)), np.ones(8), batch_size=2, verbose=0)
        >>> profile.summary.num_steps
        2

    Source: JAX, jax.profiler.start_trace; PyTorch, torch.profiler.profile.
    """
    return StepProfile(steps, folder, workers=workers, top=top, verbose=verbose)


class StepProfile(keras.callbacks.Callback):
    """The context manager and callback that `sg.profile` returns."""

    def __init__(
        self,
        steps: tuple[int, int],
        folder: str | os.PathLike[str] | None,
        *,
        workers: Sequence[int],
        top: int,
        verbose: bool,
    ) -> None:
        super().__init__()
        self.steps = _checked_steps(steps)
        self.folder = Path(
            _default_folder() if folder is None else checked_folder("folder", folder)
        )
        self.workers = _checked_workers(workers)
        self.top = top
        self.verbose = verbose
        self.summary: ProfileSummary | None = None
        self.trace: Path | None = None
        self._recorder: StepRecorder | None = None

    def __enter__(self) -> StepProfile:
        process, count = jax.process_index(), jax.process_count()
        missing = [worker for worker in self.workers if worker >= count]
        if missing:
            raise invalid(
                f"sg.profile received workers={list(self.workers)}, and this run has {count} "
                f"{'process' if count == 1 else 'processes'}.",
                expected=f"ids of processes from 0 to {count - 1}.",
                fix=f"leave out {', '.join(map(str, missing))}.",
            )
        if process in self.workers:
            folder = _writable(self.folder / f"worker-{process}")
            recorder = StepRecorder(*self.steps, folder, self._note)
            observe(recorder)
            self._recorder = recorder
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        del error, traceback
        if error_type is not None:
            self._abandon()
        elif self._recorder is not None:
            # The recorder's number of steps is read while it closes.
            try:
                self._recorder.close()
            finally:
                self._recorder = None

    def on_train_begin(self, logs: object = None) -> None:
        """Starts counting steps."""
        self.__enter__()
        call_after_fit(self._abandon)
        model: Any = self.model
        if strategy_of(model) is None:
            observe_steps(model)

    # There is no hook for batches: with one, Keras would wait for the logs of each step.

    def on_test_begin(self, logs: object = None) -> None:
        """Ends the profile before a validation if its last step has run."""
        if self._recorder is not None:
            self._recorder.end_if_done()

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        """Ends the profile after an epoch if its last step has run."""
        self.on_test_begin()

    def on_train_end(self, logs: object = None) -> None:
        """Ends the profile, and warns if it never started."""
        self.__exit__(None, None, None)

    def _abandon(self) -> None:
        """Ends the profile of a training that failed."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop(summarizes=False)

    def _note(self, trace: Path, summary: ProfileSummary) -> None:
        self.trace, self.summary = trace, summary
        if self.verbose and self._recorder is not None:
            console = Console(highlight=False)
            first = self._recorder.num_before
            last = first + max(summary.num_steps, 1) - 1
            title = f"Worker {jax.process_index()}, steps {first} to {last}"
            show_profile(summary, title, top=self.top, console=console)
            console.print(Text(f"Trace: {trace.parent}"), soft_wrap=True)


def _default_folder() -> str:
    run_dir = environment.lookup("STRATAGEM_RUN_DIR")
    return os.path.join(run_dir, "profile") if run_dir else "profile"


def _writable(folder: Path) -> Path:
    """Creates a folder, and raises OSError if no file can be created in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise OSError(
            error.errno,
            explain(
                f"sg.profile cannot write to {folder}: {error.strerror}.",
                expected="a folder in which this process can create files.",
                fix="pass folder=.",
            ),
        ) from error


def _checked_steps(steps: tuple[int, int]) -> tuple[int, int]:
    pair: tuple[object, ...] = tuple(steps)
    numbers = [one for one in pair if isinstance(one, int) and not isinstance(one, bool)]
    if len(pair) != 2 or len(numbers) != 2:
        raise TypeError(_steps_message(steps))
    first, end = numbers
    if not 0 <= first < end:
        raise ValueError(_steps_message(steps))
    return first, end


def _steps_message(steps: object) -> str:
    return explain(
        f"sg.profile received steps={steps!r}.",
        expected="the number of steps before the profile and, larger, at its end.",
        fix="pass steps=(10, 20), for example.",
    )


def _checked_workers(workers: Sequence[int]) -> tuple[int, ...]:
    if isinstance(workers, int) or not all(isinstance(one, int) for one in workers):
        raise TypeError(_workers_message(workers))
    if not workers or min(workers) < 0:
        raise ValueError(_workers_message(workers))
    return tuple(workers)


def _workers_message(workers: object) -> str:
    return explain(
        f"sg.profile received workers={workers!r}.",
        expected="one or more ids of processes, from 0.",
        fix="pass workers=[0], or list(range(jax.process_count())) for all.",
    )
