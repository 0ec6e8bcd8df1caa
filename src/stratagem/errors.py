"""Exception classes of this library.

::

    Exception
    ├── ValueError ──────── InvalidArgumentError   shapes that do not fit a reduction or a gather
    ├── IndexError ──────── OutOfRangeError        reading past the end of the data
    ├── LookupError ─────── NotFoundError          missing checkpoint or accelerator
    ├── MemoryError ─────── ResourceExhaustedError a device is out of memory
    ├── OSError ─────────── DataLossError          damaged checkpoint files
    ├── TimeoutError ────── DeadlineExceededError  a wait timed out
    ├── ConnectionError ─── UnavailableError       a peer was lost
    │                       └── PSUnavailableError a parameter server was lost for good
    └── RuntimeError ──┬─── CancelledError         a scheduled function was cancelled
                       ├─── PoisonExampleError     an input worker could not read an example
                       ├─── ClosureInputError      an input of a scheduled function failed
                       └─── ClosureAbortedError    a scheduled function was aborted

Each class derives from the builtin that a caller would catch. The whole message is its only
argument, so that it can be pickled and sent between processes.
"""

from __future__ import annotations

import math
import numbers
import signal
import threading
import types
from collections.abc import Collection
from typing import Any

__all__ = [
    "CancelledError",
    "ClosureAbortedError",
    "ClosureInputError",
    "DataLossError",
    "DeadlineExceededError",
    "InvalidArgumentError",
    "NotFoundError",
    "OutOfRangeError",
    "PSUnavailableError",
    "PoisonExampleError",
    "ResourceExhaustedError",
    "UnavailableError",
]


class InvalidArgumentError(ValueError):
    """Raised for shapes that do not fit a reduction or a gather.

    Example:
        >>> try:
        ...     sg.compute_average_loss(np.ones(4), global_batch_size=-4)
        ... except sg.errors.InvalidArgumentError as error:
        ...     print(str(error).splitlines()[0])
        compute_average_loss received global_batch_size=-4.

    Source: TF 2.21 errors_impl.py, InvalidArgumentError.
    """


class OutOfRangeError(IndexError):
    """Raised for reading past the end of the data.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> batches = iter(strategy.distribute_dataset([np.arange(4)]))
        >>> batches.get_next()
        PerReplica[[0 1] | [2 3]]
        >>> try:
        ...     batches.get_next()
        ... except sg.errors.OutOfRangeError as error:
        ...     print(str(error).splitlines()[0])
        The distributed dataset has no more batches.

    Source: TF 2.21 errors_impl.py, OutOfRangeError.
    """


class NotFoundError(LookupError):
    """Raised when a checkpoint or an accelerator does not exist.

    Example:
        >>> try:
        ...     sg.train.load_checkpoint("no/such/folder")
        ... except sg.errors.NotFoundError as error:
        ...     print(isinstance(error, LookupError))
        True

    Source: TF 2.21 errors_impl.py, NotFoundError.
    """


class ResourceExhaustedError(MemoryError):
    """Raised when a device, or pinned host memory, has no memory left for what was requested.

    The message names the largest variables, whether they still have their values, and the options
    that help. JAX's error is its cause.

    Example:
        >>> def train(batch_size):  # stands in for fit on a GPU
        ...     if batch_size > 64:
        ...         raise sg.errors.ResourceExhaustedError("cuda:0 is out of memory.")
        ...     return batch_size
        >>> try:
        ...     train(128)
        ... except MemoryError:  # the builtin that it derives from
        ...     print(train(64))
        64

    Source: TF 2.21 errors_impl.py, ResourceExhaustedError.
    """


class DataLossError(OSError):
    """Raised when checkpoint files do not match what was written.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sg.train.Checkpoint(weights=sg.Variable([1.0, 2.0])).save(folder + "/ckpt")
        ...     for file in pathlib.Path(path).rglob("*"):
        ...         if file.suffix != ".json" and file.is_file():
        ...             size = file.write_bytes(b"damaged")
        ...     try:
        ...         sg.train.load_variable(path, "weights/value")
        ...     except sg.errors.DataLossError as error:
        ...         print(isinstance(error, OSError))
        True

    Source: TF 2.21 errors_impl.py, DataLossError.
    """


class DeadlineExceededError(TimeoutError):
    """Raised when a wait exceeds its time limit.

    Example:
        >>> def wait_for_workers():  # stands in for a strategy whose workers do not start
        ...     raise sg.errors.DeadlineExceededError("2 of 4 workers did not join within 300 s.")
        >>> try:
        ...     wait_for_workers()
        ... except TimeoutError as error:  # the builtin that it derives from
        ...     print(error)
        2 of 4 workers did not join within 300 s.

    Source: TF 2.21 errors_impl.py, DeadlineExceededError.
    """


class UnavailableError(ConnectionError):
    """Raised when a peer is lost.

    Example:
        >>> def train():  # stands in for a step whose peer is gone
        ...     raise sg.errors.UnavailableError("Worker 3 was lost at step 120.")
        >>> try:
        ...     train()
        ... except ConnectionError as error:  # the builtin that it derives from
        ...     print(error)
        Worker 3 was lost at step 120.

    Source: TF 2.21 errors_impl.py, UnavailableError.
    """


class PSUnavailableError(UnavailableError):
    """Raised when a parameter server is lost and cannot be recovered.

    Example:
        >>> def train():  # stands in for fit, once a parameter server's machine is gone
        ...     raise sg.errors.PSUnavailableError("Parameter server 1 was lost.")
        >>> try:
        ...     train()
        ... except sg.errors.UnavailableError as error:
        ...     print(f"{error} Start again from the last checkpoint.")
        Parameter server 1 was lost. Start again from the last checkpoint.

    Source: TF 2.21 cluster_coordinator.py, PSUnavailableError.
    """


class CancelledError(RuntimeError):
    """Raised for a scheduled function that was cancelled because another one failed.

    Example:
        >>> result = sg.coordinator.RemoteValue()
        >>> result.abort(sg.errors.CancelledError("Cancelled: another function failed."))
        >>> try:
        ...     result.fetch()
        ... except sg.errors.CancelledError as error:
        ...     print(error)
        Cancelled: another function failed.

    Source: TF 2.21 errors_impl.py, CancelledError.
    """


class ClosureInputError(RuntimeError):
    """Raised for a scheduled function with a failed input.

    Example:
        >>> result = sg.coordinator.RemoteValue()
        >>> result.abort(sg.errors.ClosureInputError("The iterator of worker 0 failed."))
        >>> try:
        ...     result.fetch()
        ... except sg.errors.ClosureInputError as error:
        ...     print(error)
        The iterator of worker 0 failed.

    Source: TF 2.21 cluster_coordinator.py, ClosureInputError.
    """


class ClosureAbortedError(RuntimeError):
    """Raised for a scheduled function that was aborted.

    Example:
        >>> result = sg.coordinator.RemoteValue()
        >>> result.abort(sg.errors.ClosureAbortedError("The coordinator was closed."))
        >>> try:
        ...     result.fetch()
        ... except sg.errors.ClosureAbortedError as error:
        ...     print(error)
        The coordinator was closed.

    Source: TF 2.21 cluster_coordinator.py, ClosureAbortedError.
    """


class PoisonExampleError(RuntimeError):
    """Raised when an input worker cannot read a batch: a function of the dataset failed.

    The message names the file or the split, the number of the batch, and the function and line that
    failed, and has the traceback of the worker.

    Example:
        >>> def batches():
        ...     yield np.zeros(2)
        ...     raise ValueError("The image is truncated.")
        >>> dataset = sg.input.Dataset.from_generator(batches)
        >>> dispatcher = sg.input.service.DispatchServer()
        >>> config = sg.input.service.WorkerConfig(dispatcher.target)
        >>> worker = sg.input.service.WorkerServer(config)
        >>> distribute = sg.input.service.distribute("distributed_epoch", dispatcher.target)
        >>> try:
        ...     for batch in dataset.apply(distribute):
        ...         print(batch)
        ... except sg.errors.PoisonExampleError as error:
        ...     print("batch 1 of split 0" in str(error), "line 3" in str(error))
        [0. 0.]
        True True
        >>> worker.stop()
        >>> dispatcher.stop()

    Source: specific to Stratagem.
    """


# `explain`: the format of every error message.


def explain(received: str, *, expected: str, fix: str, code: str | None = None) -> str:
    """Joins the parts of an error message: the problem with its values, valid values, the remedy.

    `code` names a row of docs/reference/errors/index.md, or a page beside it.

    Example:
        >>> print(explain("axis=3 is out of range.", expected="-2 <= axis < 2.", fix="pass 0."))
        axis=3 is out of range.
        Expected -2 <= axis < 2.
        Fix: pass 0.
        >>> print(explain("No batch.", expected="one.", fix="repeat the data.", code="SG304"))
        No batch.
        Expected one.
        Fix: repeat the data.
        Help: stratagem explain SG304
    """
    message = f"{received}\nExpected {expected}\nFix: {fix}"
    return message if code is None else f"{message}\nHelp: stratagem explain {code}"


def invalid(received: str, expected: str, fix: str, code: str | None = None) -> ValueError:
    """Returns the error for a wrong value, with the message of `explain`."""
    return ValueError(explain(received, expected=expected, fix=fix, code=code))


def check_number(
    owner: str,
    least: float = 1,
    *,
    above: float | None = None,
    or_none: bool = False,
    **arguments: Any,
) -> None:
    """Raises a ValueError unless arguments, by name, are numbers of at least `least`.

    With `above`, they are to be larger than that. Without, and if `least` is an int, they are to be
    integers. With `or_none`, None is valid, too. What is neither such a number nor None raises a
    TypeError. `owner` is the class or function that received them.

    Example:
        >>> check_number("Tables", num_versions=0)
        Traceback (most recent call last):
        ValueError: Tables received num_versions=0...
    """
    is_whole = above is None and isinstance(least, int)
    bound = f"of at least {least:g}" if above is None else f"above {above:g}"
    kind: Any = numbers.Integral if is_whole else numbers.Real
    for name, value in arguments.items():
        if value is None and or_none:
            continue
        number: Any = value
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        is_large = is_number and (number >= least if above is None else number > above)
        if is_large and math.isfinite(number):
            continue
        none = ", or None" if or_none else ""
        error = ValueError if is_number or value is None else TypeError
        raise error(
            explain(
                f"{owner} received {name}={value!r}.",
                expected=f"{'an integer' if is_whole else 'a number'} {bound}{none}.",
                fix=f"pass such a number as {name}{', or omit it' if or_none else ''}.",
            )
        )


def check_choice(owner: str, choices: Collection[object], **arguments: object) -> None:
    """Raises a ValueError unless arguments, by name, are among `choices`."""
    for name, value in arguments.items():
        if value not in choices:
            raise ValueError(
                explain(
                    f"{owner} received {name}={value!r}.",
                    expected=f"one of {', '.join(map(repr, choices))}.",
                    fix=f"pass one of these as {name}, or omit it.",
                )
            )


def check_type(
    name: str,
    value: object,
    kind: Any,
    wanted: str = "",
    fix: str = "",
    *,
    owner: str = "",
    error: type[Exception] = TypeError,
) -> None:
    """Raises a TypeError unless an argument is of a class, or passes a function such as `callable`.

    `kind` may be a union of classes. `wanted` describes valid arguments. A bool is no int.
    """
    is_class = isinstance(kind, type | types.UnionType)
    is_valid = isinstance(value, kind) if is_class else kind(value)
    if is_valid and not (kind in (int, int | None) and isinstance(value, bool)):
        return
    wanted = wanted or f"a {kind.__name__}"
    given = f"{name}={value!r}"
    raise error(
        explain(
            f"{owner} received {given} of type {type(value).__name__}."
            if owner
            else f"{given} is of type {type(value).__name__}.",
            expected=f"{wanted}.",
            fix=fix or f"pass {wanted} as {name}.",
        )
    )


# Exit codes of the commands, of launched tasks, and of programs that save and exit.

SUCCESS = 0
# An error, or a check that found something.
FAILURE = 1
# A wrong option, argument or command; click exits with it.
USAGE = 2
# Saved, to be resumed: the templates for Kubernetes and Slurm restart such a job.
RESUMABLE = 42
# Could not join others, which had ended: it has done nothing.
NOT_NEEDED = 43
# As shells report a program that a signal ended.
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


# Errors of background work, stored until the next training step raises them.

reported_errors: list[Exception] = []
_lock = threading.Lock()


def report_error(error: Exception) -> None:
    """Stores an error for the next step; thread-safe."""
    with _lock:
        reported_errors.append(error)


def raise_reported() -> None:
    """Removes the oldest stored error and raises it."""
    with _lock:
        error = reported_errors.pop(0) if reported_errors else None
    if error is not None:
        raise error


def take_reported() -> list[Exception]:
    """Removes and returns all stored errors."""
    with _lock:
        taken = reported_errors[:]
        reported_errors.clear()
    return taken


# TensorFlow names that are spelled differently here, for aliases and error messages.

# Strategy methods under another name.
SAME_METHODS = {
    "call_for_each_replica": "run",
    "experimental_run_v2": "run",
    "unwrap": "local_results",
}

# Strategy methods, and what to use instead.
OLD_METHODS = {
    "experimental_make_numpy_dataset": "strategy.distribute_dataset(sg.input.Dataset(arrays, "
    "batch_size=global_batch_size))",
    "experimental_run": "strategy.run(fn, args=next(iterator))",
    "experimental_run_steps_on_iterator": "strategy.run_steps(fn, iterator, num_steps)",
    "make_dataset_iterator": "iter(strategy.distribute_dataset(dataset))",
    "make_input_fn_iterator": "iter(strategy.distribute_datasets_from_function(dataset_fn))",
}

# Constructor arguments of strategies, and what to use instead.
OLD_ARGUMENTS = {
    "num_gpus": 'devices=[f"gpu:{i}" for i in range(num_gpus)]',
    "num_gpus_per_worker": 'devices=[f"gpu:{i}" for i in range(num_gpus_per_worker)]',
}

# Names of the `tf` module, and what to use instead.
OLD_NAMES = {
    "GradientTape": "sg.value_and_grad(loss_fn, variables)",
    "constant": "jax.numpy.asarray(value)",
    "data": "sg.input.Dataset(arrays, batch_size=...), or any other dataset",
    "distribute": "the names of tf.distribute themselves, such as sg.MirroredStrategy",
    "print": "jax.debug.print(...)",
    "reduce_mean": "jax.numpy.mean(value)",
    "reduce_sum": "jax.numpy.sum(value)",
}
