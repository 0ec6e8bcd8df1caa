"""Save-and-exit between the steps of a loop after a preemption notice."""

from __future__ import annotations

import contextlib
import enum
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, ParamSpec, TypeVar

from stratagem import logs
from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.manager import CheckpointManager
from stratagem.cluster.preemption.configuration import TerminationConfig
from stratagem.cluster.preemption.notices import Notice
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.roles import task_count
from stratagem.contexts import get_strategy
from stratagem.devices.processes import expect_exit
from stratagem.errors import DeadlineExceededError, InvalidArgumentError, check_type, explain
from stratagem.group.current import current_group
from stratagem.group.member import Group
from stratagem.group.verdict import Activity
from stratagem.observe.process_writer import current_events

# Agreement of all processes on the step to save after a preemption notice.

# Delay until the end of a grace period is noticed, or until the thread ends after `stop`.
_POLL_S = 0.2
# How often to check that the group still exists while waiting for answers.
_GROUP_CHECK_S = 0.1
# The last step and the last save may take longer than earlier ones.
_RESERVE = 2.0


class PreemptionAction(enum.Enum):
    """Action of all processes before their next step: save and continue, or save and exit."""

    SAVE = "save"
    EXIT = "exit"


class AgreedStep:
    """Agreement of all processes on the step to save after a preemption notice to any of them.

    Each process asks before every step, equally often. After a notice, each announces how many
    steps it has begun and begins no other until all have answered; then every process finishes the
    largest of these numbers. A background thread of the group answers, since the process may be
    inside a collective that waits for a process blocked here.

    With a grace period, the first agreement saves, and a second one exits when a notified process
    has time left for only two more steps and saves, estimated from the last ones.

    `group` is None for a single process; `name` is a unique topic, the same on all processes.

    Source: TF 2.21 failure_handling.py, _check_preemption_and_maybe_checkpoint.
    """

    def __init__(
        self, config: TerminationConfig, group: Group | None = None, *, name: str = "leaving"
    ) -> None:
        self.save_s = 0.0  # duration of the last save
        self._config = config
        self._source = config.source()
        self._group = group
        self._name = name
        self._num_processes = 1 if group is None else group.num_processes
        self._stopped = threading.Event()
        # Never held for long, and never by a signal handler.
        self._changed = threading.Condition()
        self._num_begun = 0
        self._begun_at_s = time.monotonic()
        self._last_step_s = self._step_s = 0.0
        # Numbers of agreements: requested by this process, announced to it, completed by it.
        self._num_requested = self._num_announced = self._num_done = 0
        # Answers by agreement and process: steps begun, and True if the process must exit.
        self._answers: dict[int, dict[int, tuple[int, bool]]] = {}
        self._is_over = False

    @property
    def notice(self) -> Notice | None:
        """First notice received by this process, or None; raises the error that ended listening."""
        return self._source.notice

    def start(self) -> None:
        """Starts listening for notices to this process and to others."""
        if self._group is not None:
            self._group.listen(self._name, self._receive)
        self._source.start()
        if self._group is not None:
            threading.Thread(target=self._watch, name="stratagem-notice", daemon=True).start()

    def stop(self) -> None:
        """Stops listening for notices; announcements of other processes are still answered."""
        self._stopped.set()
        self._source.stop()

    def next_step(self) -> PreemptionAction | None:
        """Returns None if this process may begin its next step, and counts that step.

        Otherwise returns the action to take before the next call. Raises DeadlineExceededError,
        naming the missing processes, if some do not answer in time.
        """
        self._request_if_due()
        with self._changed:
            if self._num_done == self._num_announced:
                return self._begin()
            number = self._num_done + 1
            answers = self._answers.setdefault(number, {})
        if len(answers) < self._num_processes:
            self._wait_for_all(answers)
        with self._changed:
            if self._num_begun < max(begun for begun, _ in answers.values()):
                return self._begin()
            self._num_done = number
            self._is_over = any(is_last for _, is_last in answers.values())
        return PreemptionAction.EXIT if self._is_over else PreemptionAction.SAVE

    def _begin(self) -> None:
        now = time.monotonic()
        last_s, self._last_step_s = self._last_step_s, now - self._begun_at_s
        # The shorter of the last two: not every step includes compilation or evaluation.
        self._step_s = min(last_s, self._last_step_s)
        self._begun_at_s = now
        self._num_begun += 1

    def _wait_for_all(self, answers: dict[int, tuple[int, bool]]) -> None:
        assert self._group is not None
        deadline = time.monotonic() + self._group.limits.barrier_s
        with self._group.at(Activity.AGREEMENT, "the step to save"), self._changed:
            while len(answers) < self._num_processes:
                self._group.check()
                if time.monotonic() > deadline:
                    raise self._timeout_error(self._group, answers)
                self._changed.wait(_GROUP_CHECK_S)

    def _timeout_error(
        self, group: Group, answers: dict[int, tuple[int, bool]]
    ) -> DeadlineExceededError:
        labels = enumerate(group.identity.labels)
        missing = ", ".join(label for index, label in labels if index not in answers)
        return DeadlineExceededError(
            explain(
                f"A process was notified of preemption, but {missing} did not report its step "
                f"within {group.limits.barrier_s:g} s.",
                expected="an answer from every process, so that all save after the same step.",
                fix="create the PreemptionCheckpointHandler in every process, or raise "
                "STRATAGEM_BARRIER_TIMEOUT_S if steps take longer.",
                code="SG707",
            )
        )

    def _request_if_due(self) -> None:
        """Requests an agreement if this process was notified and none is under way."""
        if self.notice is None:
            return
        with self._changed:
            number = self._num_done + 1
            if self._is_over or number <= max(self._num_requested, self._num_announced):
                return
            if number > 1 and not self._is_time_to_leave():
                return
            self._num_requested = number
        self._announce(number)

    def _is_time_to_leave(self) -> bool:
        notices = self._source.notices
        if not notices:
            return not self._config.grace_period
        ends_at_s = self._config.leave_at_s(notices)
        return time.monotonic() >= ends_at_s - _RESERVE * (self._step_s + self.save_s)

    def _announce(self, *numbers: int) -> None:
        if self._group is None:
            self._receive(0, list(numbers))
        else:
            self._group.announce(self._name, numbers)

    # Called by other threads.

    def _watch(self) -> None:
        try:
            while self._source.wait(_POLL_S) is None:
                if self._stopped.is_set():
                    return
            while not (self._stopped.is_set() or self._is_over):
                self._request_if_due()
                self._stopped.wait(_POLL_S)
        except Exception:  # noqa: BLE001 - `next_step` raises it in the training thread
            return

    def _receive(self, process_id: int, numbers: list[int]) -> None:
        match numbers:
            case [number]:
                self._answer(number)
            case [number, begun, is_last]:
                with self._changed:
                    self._answers.setdefault(number, {})[process_id] = (begun, bool(is_last))
                    self._changed.notify_all()
            case _:
                pass  # from an incompatible process

    def _answer(self, number: int) -> None:
        """Announces this process's progress; it begins no further step until all have answered."""
        with self._changed:
            if number != self._num_announced + 1:  # two processes asked at once
                return
            self._num_announced = number
            begun, is_last = self._num_begun, number > 1 or self._is_time_to_leave()
        self._announce(number, begun, int(is_last))


_logger = logging.getLogger(__name__)

# Every process creates the same instances in the same order.
_numbers = itertools.count(1)


class PreemptionExit:
    """Makes all processes save after the same step and exit, once any of them is notified."""

    def __init__(self, config: TerminationConfig, manager: CheckpointManager, name: str) -> None:
        self._config = config.for_environment()
        self._manager = manager
        self._name = name
        self._saved_after: int | None = None
        topic = f"preemption exit {next(_numbers)}"
        self._agreed_step = AgreedStep(self._config, current_group(), name=topic)
        self._agreed_step.start()

    def before_step(self, num_done: int, save: Callable[[], bool]) -> None:
        """Saves and exits if an action is due. Call on every process before each step.

        `save` is collective; it returns False if there was nothing to save. Raises SystemExit, or
        the error of a custom `exit_fn`.
        """
        while (due := self._agreed_step.next_step()) is not None:
            if self._saved_after != num_done:  # else the grace period ended during the save
                self._save(num_done, save)
                self._saved_after = num_done
            if due is PreemptionAction.EXIT:
                self._leave()

    def stop(self) -> None:
        """Stops listening and restores the signal handlers."""
        self._agreed_step.stop()

    def _save(self, num_done: int, save: Callable[[], bool]) -> None:
        begun_s = time.monotonic()
        if not save():
            return
        self._agreed_step.save_s = time.monotonic() - begun_s
        notice = self._agreed_step.notice
        reason = "another process was notified" if notice is None else notice.message
        print_status(self._name, f"saved after step {num_done}: {reason}")

    def _leave(self) -> None:
        # No process exits before all have saved and asynchronous writes are finished: an early
        # exit would break the collectives of the others.
        self._manager.sync()
        try:
            self._config.exit()
        except SystemExit as exit_error:
            expect_exit(exit_error.code)
            events = current_events()
            # Record the exit code now; it is not available when the program ends.
            if events is not None and isinstance(exit_error.code, int):
                events.end(exit_error.code, "left after notice")
            raise


def print_status(name: str, text: str) -> None:
    """Prints a status message with the name of this process to stderr."""
    group = current_group()
    where = "" if group is None else f"{group.identity.label}: "
    logs.announce(_logger, f"{name}: {where}{text}")


# Handler that saves and exits all processes after a preemption notice to any of them.


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
        check_type("termination_config", config, TerminationConfig)
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
    wanted = "a Checkpoint or a CheckpointManager"
    check_type("checkpoint_or_checkpoint_manager", saved, Checkpoint | CheckpointManager, wanted)
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
    check_type("cluster_resolver", resolver, ClusterResolver)
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
