"""Saves in all processes and leaves, when one of them got notice before preemption."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.leaving import Leaving, tell
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.checkpoint.run_calls import RunCalls, is_built, restore_latest
from stratagem.cluster import ClusterResolver, task_count
from stratagem.context import get_strategy
from stratagem.errors import InvalidArgumentError
from stratagem.group import current_group
from stratagem.messages import explain
from stratagem.preemption import TerminationConfig

__all__ = ["PreemptionCheckpointHandler"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class PreemptionCheckpointHandler:
    """Runs the steps of a loop, and saves and leaves after one when any process got notice.

    When made it restores the latest checkpoint. All processes make it, and run as many steps. After
    a notice to any of them all finish the same step, save one checkpoint before the next, and end
    by `exit_fn`; a grace period is used for more steps between a first and a last checkpoint.
    Where nobody runs another step, nothing is saved and the program ends as ever.

    What `fn` raises in one process ends the group, as everywhere: the others raise
    `UnavailableError`, which names the process and its error.

    Args:
        cluster_resolver: tells the cluster; None for that of the current strategy.
        checkpoint_or_checkpoint_manager: what to save. Each save of this checkpoint holds the
            count of steps too.
        checkpoint_dir: the folder for a `Checkpoint`; the newest checkpoint there is kept.
        termination_config: what counts as notice and what is done then; `for_environment` fills in
            what is left out.

    Raises:
        InvalidArgumentError: a `Checkpoint` without a folder.
        NotImplementedError: the cluster has parameter servers.
        RuntimeError: several processes that do not know each other; or it cannot listen here, as
            outside the main thread.
        TypeError: an argument of another type.
        DataLossError: the latest checkpoint is damaged; and what else restoring it raises.

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
        # Before it restores, which may take long: who gets notice meanwhile leaves well, too.
        self._leaving = Leaving(self._config, self._manager, type(self).__name__)
        try:
            restore_latest(self._manager, self._calls)
        except BaseException:
            self.stop()
            raise

    @property
    def total_run_calls(self) -> int:
        """How many steps `run` has done, those before a restart included.

        Calls of `save_checkpoint_if_preempted` count likewise.
        """
        return self._calls.count

    def run(
        self,
        distributed_train_function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        """Runs one step; before it, saves and leaves if that is due.

        Args:
            distributed_train_function: does the step, mostly by `strategy.run`.
            *args: what it gets.
            **kwargs: what it gets by name.

        Returns:
            What the function returned.

        Raises:
            SystemExit: the checkpoint is saved; or what `exit_fn` of one's own raises.
            DeadlineExceededError: a process does not say how far it is; the message names it.
            Exception: what the function raises, and saving, and a `termination_watcher_fn`.
        """
        self._act()
        result = distributed_train_function(*args, **kwargs)
        self._count()
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Saves and leaves if that is due; for loops without `run`, once after each step.

        Args:
            *args: for `CheckpointManager.save`, or for `save_fn`.
            **kwargs: likewise.

        Raises:
            SystemExit: as of `run`, and what else that raises.
        """
        self._count()
        self._act(*args, **kwargs)

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Generator[None]:
        """Saves and leaves also after the last step, where a loop ends well within this scope.

        Yields:
            Nothing.

        Raises:
            SystemExit: as of `run`, and what else that raises.
        """
        yield
        self._act()

    def stop(self) -> None:
        """Ends listening for notices, and puts back the handlers of signals.

        Leaving does without it: a second signal does not disturb the end of the program then.
        """
        self._leaving.stop()

    def _count(self) -> None:
        self._calls.count += 1
        self._num_run += 1

    def _act(self, *args: Any, **kwargs: Any) -> None:
        self._leaving.before_step(self.total_run_calls, lambda: self._save(*args, **kwargs))

    def _save(self, *args: Any, **kwargs: Any) -> bool:
        if self._config.save_fn is not None:
            self._config.save_fn(*args, **kwargs)
        elif self._num_run == 0 and not is_built(self._manager.checkpoint):
            tell(type(self).__name__, "there is notice before the first step: nothing to save yet")
            return False
        else:
            if len(args) < 2:
                kwargs = {"check_interval": False, **kwargs}
            self._manager.save(*args, **kwargs)
        return True


def _manager_of(
    given: Checkpoint | CheckpointManager, folder: str | os.PathLike[str] | None
) -> CheckpointManager:
    _check_kind("checkpoint_or_checkpoint_manager", given, Checkpoint, CheckpointManager)
    if isinstance(given, CheckpointManager):
        return given
    if not folder:
        raise InvalidArgumentError(
            explain(
                f"A Checkpoint came with checkpoint_dir={folder!r}.",
                expected="the folder to save it in and to restore it from.",
                fix="pass checkpoint_dir, or a CheckpointManager.",
            )
        )
    return CheckpointManager(given, folder, max_to_keep=1)


def _check_cluster(given: ClusterResolver | None) -> None:
    resolver = get_strategy().cluster_resolver if given is None else given
    if resolver is None:
        return
    _check_kind("cluster_resolver", resolver, ClusterResolver)
    spec = resolver.cluster_spec()
    if task_count(spec, "ps"):
        raise NotImplementedError(
            explain(
                f"The cluster has parameter servers: {spec!r}.",
                expected="processes that train in lockstep, or one alone.",
                fix="save with a CheckpointManager in the coordinator: servers are not preempted "
                "together with the workers.",
            )
        )
    if current_group() is None and resolver.processes().num_processes > 1:
        raise RuntimeError(
            explain(
                f"The handler is one of {resolver.processes().num_processes} processes, which do "
                "not know each other yet.",
                expected="a strategy that brings the processes together before.",
                fix="make sg.MultiWorkerMirroredStrategy first, with the same resolver.",
            )
        )


def _check_kind(name: str, value: object, *kinds: type) -> None:
    if not isinstance(value, kinds):
        raise TypeError(
            explain(
                f"{name}={value!r} is of type {type(value).__name__}.",
                expected=f"a {' or a '.join(kind.__name__ for kind in kinds)}.",
                fix=f"pass such an object as {name}.",
            )
        )
