"""Handler that saves and exits all processes after a preemption notice to any of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.preemption_exit import PreemptionExit, print_status
from stratagem.cluster.preemption.configuration import TerminationConfig
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.roles import task_count
from stratagem.contexts import get_strategy
from stratagem.errors import InvalidArgumentError, explain
from stratagem.group.current import current_group

# Step count of a `PreemptionCheckpointHandler`, stored in the checkpoints themselves.

_NAME = "PreemptionCheckpointHandler"


class RunCalls:
    """Step count with a state that checkpoints can store."""

    def __init__(self) -> None:
        self.count = 0

    def get_state(self) -> int:
        """Returns the count."""
        return self.count

    def set_state(self, state: int) -> None:
        """Restores a count."""
        self.count = int(state)


def restore_latest(manager: CheckpointManager, calls: RunCalls) -> str | None:
    """Restores the latest checkpoint, and adds the count to all checkpoints saved from now on.

    Checkpoints without a count leave it unchanged. Returns the path, or None without a checkpoint.
    """
    checkpoint = manager.checkpoint
    checkpoint.detach(_NAME)  # the count of an earlier handler
    path = manager.restore_or_initialize()
    count = calls.count
    checkpoint.attach(_NAME, calls)  # restores the saved count
    if path is None:  # an earlier restore belongs to another run
        calls.set_state(count)
    return path


def is_built(checkpoint: Checkpoint) -> bool:
    """True if all objects of a checkpoint have their variables."""
    try:
        checkpoint.parts()
    except ValueError:
        return False
    return True


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class PreemptionCheckpointHandler:
    """Runs the steps of a loop; after a preemption notice to any process, all save and exit.

    The constructor restores the latest checkpoint. Create the handler in every process and run the
    same number of steps in each. After a notice, all processes finish the same step, save one
    checkpoint and call `exit_fn`. With a grace period, they save, continue training, and save again
    before the period ends. A notice after the last step has no effect.

    An exception raised by the step in one process ends the group, as always: the others raise
    `UnavailableError`, which names the process and its error.

    Args:
        cluster_resolver: resolver of the cluster; None for the current strategy's.
        checkpoint_or_checkpoint_manager: what to save. Its checkpoints also hold the number of
            steps.
        checkpoint_dir: folder for a `Checkpoint`; only the newest checkpoint is kept.
        termination_config: what counts as notice, and how to exit. Missing values come from
            `TerminationConfig.for_environment`.

    Raises:
        InvalidArgumentError: a `Checkpoint` without a folder.
        NotImplementedError: the cluster has parameter servers.
        RuntimeError: there are several processes, but no group connects them; or signals cannot be
            handled here, for example outside the main thread.
        TypeError: an argument of another type.
        DataLossError: the latest checkpoint is damaged.

    Example:
        >>> import signal, sys, tempfile
        >>> step = sg.Variable(0, dtype="int32")
        >>> def train():
        ...     step.assign_add(1)
        ...     if int(step) == 3:
        ...         signal.raise_signal(signal.SIGTERM)  # in place of the scheduler
        >>> def loop(folder):
        ...     handler = sg.PreemptionCheckpointHandler(
        ...         None, sg.train.Checkpoint(step=step), folder,
        ...         sg.TerminationConfig(exit_fn=lambda: sys.exit(42)))
        ...     try:
        ...         while handler.total_run_calls < 5:
        ...             handler.run(train)
        ...     except SystemExit as leaving:
        ...         print("exit code", leaving.code, "after step", handler.total_run_calls)
        ...     handler.stop()
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loop(folder)
        ...     _ = step.assign(0)
        ...     loop(folder)
        ...     print(int(step))
        exit code 42 after step 3
        5

    Source: TF 2.21 failure_handling.py, PreemptionCheckpointHandler.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        config = TerminationConfig() if termination_config is None else termination_config
        _check_kind("termination_config", config, TerminationConfig)
        _check_cluster(cluster_resolver)
        self._config = config.for_environment()
        self._calls = RunCalls()
        self._num_run = 0
        # Listen before restoring, which may take long: a notice meanwhile is honored, too.
        self._preemption_exit = PreemptionExit(self._config, self._manager, type(self).__name__)
        try:
            restore_latest(self._manager, self._calls)
        except BaseException:
            self.stop()
            raise

    @property
    def total_run_calls(self) -> int:
        """Number of steps that `run` has completed, including those before a restart.

        Calls of `save_checkpoint_if_preempted` count, too.
        """
        return self._calls.count

    def run(
        self,
        distributed_train_function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Saves and exits if due; otherwise runs one step.

        Args:
            distributed_train_function: runs the step, usually with `strategy.run`.
            *args: its positional arguments.
            **kwargs: its keyword arguments.

        Returns:
            Result of the function.

        Raises:
            SystemExit: after the save; a custom `exit_fn` may raise another exception.
            DeadlineExceededError: a process did not report its step in time; the message names it.
            Exception: any error of the function, of saving, or of a `termination_watcher_fn`.
        """
        self._save_and_exit_if_due()
        result = distributed_train_function(*args, **kwargs)
        self._count_step()
        return result

    def save_checkpoint_if_preempted(self, *args: object, **kwargs: object) -> None:
        """Saves and exits if due. Call once after each step, in loops without `run`.

        Args:
            *args: passed to `CheckpointManager.save`, or to `save_fn`.
            **kwargs: passed to `CheckpointManager.save`, or to `save_fn`.

        Raises:
            SystemExit: after the save, as in `run`.
        """
        self._count_step()
        self._save_and_exit_if_due(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Generator[None]:
        """Saves and exits if due when the scope ends normally, that is, also after the last step.

        Yields:
            Nothing.

        Raises:
            SystemExit: after the save, as in `run`.
        """
        yield
        self._save_and_exit_if_due()

    def stop(self) -> None:
        """Stops listening for notices and restores the signal handlers.

        Not needed before exiting: a second signal is then ignored until the program ends.
        """
        self._preemption_exit.stop()

    def _count_step(self) -> None:
        self._calls.count += 1
        self._num_run += 1

    def _save_and_exit_if_due(self, *args: object, **kwargs: object) -> None:
        self._preemption_exit.before_step(self.total_run_calls, lambda: self._save(*args, **kwargs))

    def _save(self, *args: Any, **kwargs: Any) -> bool:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        elif self._num_run == 0 and not is_built(self._manager.checkpoint):
            print_status(type(self).__name__, "notified before the first step: nothing to save yet")
            return False
        else:
            if len(args) < 2:
                kwargs = {"check_interval": False, **kwargs}
            self._manager.save(*args, **kwargs)
        return True


def _manager_of(
    saved: Checkpoint | CheckpointManager, folder: str | os.PathLike[str] | None
) -> CheckpointManager:
    _check_kind("checkpoint_or_checkpoint_manager", saved, Checkpoint, CheckpointManager)
    if isinstance(saved, CheckpointManager):
        return saved
    if not folder:
        raise InvalidArgumentError(
            explain(
                f"A Checkpoint was passed with checkpoint_dir={folder!r}.",
                expected="a folder to save it in and to restore it from.",
                fix="pass checkpoint_dir, or a CheckpointManager.",
            )
        )
    return CheckpointManager(saved, folder, max_to_keep=1)


def _check_cluster(cluster_resolver: ClusterResolver | None) -> None:
    resolver = cluster_resolver or get_strategy().cluster_resolver
    if resolver is None:
        return
    _check_kind("cluster_resolver", resolver, ClusterResolver)
    spec = resolver.cluster_spec()
    if task_count(spec, "ps"):
        raise NotImplementedError(
            explain(
                f"The cluster has parameter servers: {spec!r}.",
                expected="processes that train in lockstep, or a single process.",
                fix="save with a CheckpointManager in the coordinator; servers are not preempted "
                "together with the workers.",
            )
        )
    if current_group() is None and resolver.processes().num_processes > 1:
        raise RuntimeError(
            explain(
                f"The cluster has {resolver.processes().num_processes} processes, but this one is "
                "not connected to the others.",
                expected="a strategy that connects the processes first.",
                fix="create sg.MultiWorkerMirroredStrategy first, with the same resolver.",
            )
        )


def _check_kind(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        raise TypeError(
            explain(
                f"{name}={value!r} is of type {type(value).__name__}.",
                expected=f"a {' or a '.join(kind.__name__ for kind in kinds)}.",
                fix=f"pass a {kinds[0].__name__} as {name}.",
            )
        )
