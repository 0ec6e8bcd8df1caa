"""Hooks: code that runs on the host between an Estimator's steps, and its timers."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stratagem import settings
from stratagem.errors import DeadlineExceededError, check_number, explain
from stratagem.estimator.checks import check_one_of, check_unsupported
from stratagem.group.current import current_group
from stratagem.strategies.collectives import host

if TYPE_CHECKING:
    from stratagem.estimator.loops import Session


@dataclasses.dataclass(frozen=True)
class SessionRunArgs:
    """Values that a hook requests from a step.

    Args:
        fetches: a structure of names and values that `Session.run` accepts. Its values after the
            step arrive in `SessionRunValues.results`.
        feed_dict: must be None; there are no placeholders.
        options: ignored.

    Raises:
        NotImplementedError: if `feed_dict` is set.

    Example:
        >>> sg.estimator.SessionRunArgs({"loss": "loss"}).fetches
        {'loss': 'loss'}

    Source: TF 2.21 session_run_hook.py, SessionRunArgs.
    """

    fetches: Any
    feed_dict: Any = None
    options: Any = None

    def __post_init__(self) -> None:
        check_unsupported("feed_dict", self.feed_dict)


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """Values that a hook receives after a step.

    Args:
        results: the requested values, in the structure of `fetches`; None if none were requested.
        options: None.
        run_metadata: None.

    Example:
        >>> values = sg.estimator.SessionRunValues(results={"loss": np.float32(0.5)})
        >>> float(values.results["loss"])
        0.5

    Source: TF 2.21 session_run_hook.py, SessionRunValues.
    """

    results: Any
    options: Any = None
    run_metadata: Any = None


@dataclasses.dataclass
class SessionRunContext:
    """Step that a hook is called for, with a way to stop the loop.

    Args:
        original_args: the values that the loop itself requests.
        session: the session.

    Attributes:
        stop_requested: True if a hook requested a stop.

    Example:
        >>> context = sg.estimator.SessionRunContext(sg.estimator.SessionRunArgs(None), None)
        >>> context.request_stop()
        >>> context.stop_requested
        True

    Source: TF 2.21 session_run_hook.py, SessionRunContext.
    """

    original_args: SessionRunArgs
    session: Session
    stop_requested: bool = dataclasses.field(default=False, init=False)

    def request_stop(self) -> None:
        """Stops the loop after all hooks have been called for this step."""
        self.stop_requested = True


class SessionRunHook:
    """Base class for code that a loop calls on the host, at its start, around steps and at its end.

    All methods are optional. Values requested in `before_run` are fetched from the devices for
    that step only. If no hook requests values, the loop never waits for the devices.

    Example:
        >>> class Counter(sg.estimator.SessionRunHook):
        ...     steps = 0
        ...     def after_run(self, run_context, run_values):
        ...         self.steps += 1

    Source: TF 2.21 session_run_hook.py, SessionRunHook.
    """

    def begin(self) -> None:
        """Called once, before variables are created or restored."""

    def after_create_session(self, session: Session, coord: object) -> None:
        """Called once, when all variables are initialized.

        Args:
            session: the session.
            coord: None; TensorFlow passes a thread coordinator.
        """

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each step.

        Args:
            run_context: the step.

        Returns:
            The values to fetch, or None for nothing.
        """

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each step.

        Args:
            run_context: the step.
            run_values: the values that `before_run` requested.
        """

    def end(self, session: Session) -> None:
        """Called once after the last step, unless the loop failed.

        Args:
            session: the session.
        """


# StopAtStepHook: stops training at a step.


class StopAtStepHook(SessionRunHook):
    """Stops training after a number of steps, or at a global step.

    Args:
        num_steps: the number of steps from the start of this run.
        last_step: the global step to stop at.

    Raises:
        ValueError: unless exactly one of the two is set.

    Example:
        >>> hook = sg.estimator.StopAtStepHook(last_step=1000)

    Source: TF 2.21 basic_session_run_hooks.py, StopAtStepHook.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        check_one_of("StopAtStepHook", num_steps=num_steps, last_step=last_step)
        self._num_steps = num_steps
        self._last_step = last_step

    def after_create_session(self, session: Session, coord: object) -> None:
        """Computes the last step."""
        if self._num_steps is not None:
            self._last_step = session.global_step + self._num_steps

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Requests a stop at the last step."""
        assert self._last_step is not None
        if run_context.session.global_step >= self._last_step:
            run_context.request_stop()


# Timers that trigger hooks after a number of steps or seconds.


Clock = Callable[[], float]

# Synchronization makes processes wait for each other, so it happens only this often.
_SYNC_EVERY_S = 1.0
_MAX_STEPS_BETWEEN_SYNCS = 1000


class SecondOrStepTimer:
    """Timer that triggers at the first step, then every N seconds or every N steps.

    Args:
        every_secs: seconds between triggers.
        every_steps: steps between triggers.
        clock: returns the time in seconds.

    Raises:
        ValueError: unless exactly one of the two is set, or if it is negative.

    Example:
        >>> timer = sg.estimator.SecondOrStepTimer(every_steps=10)
        >>> timer.should_trigger_for_step(3)
        True
        >>> timer.update_last_triggered_step(3)
        (None, None)
        >>> timer.should_trigger_for_step(12), timer.should_trigger_for_step(13)
        (False, True)

    Source: TF 2.21 basic_session_run_hooks.py, SecondOrStepTimer.
    """

    def __init__(
        self,
        every_secs: float | None = None,
        every_steps: int | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        check_one_of("A timer", every_secs=every_secs, every_steps=every_steps)
        check_number("A timer", 0.0, or_none=True, every_secs=every_secs, every_steps=every_steps)
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forgets the last trigger: the next step triggers."""
        self._last_step: int | None = None
        self._last_time_s = 0.0

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns whether a step should trigger.

        Args:
            step: the step number.

        Returns:
            True before the first trigger and after the interval; False at the last triggered step.
        """
        if self._last_step is None:
            return True
        if step == self._last_step:
            return False
        if self._every_steps is not None:
            return step >= self._last_step + self._every_steps
        assert self._every_secs is not None
        return self._clock() >= self._last_time_s + self._every_secs

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Records a trigger.

        Args:
            step: the step number.

        Returns:
            Seconds and steps since the previous trigger; None for both at the first.
        """
        now_s, elapsed = self._clock(), (None, None)
        if self._last_step is not None:
            elapsed = now_s - self._last_time_s, step - self._last_step
        self._last_time_s, self._last_step = now_s, step
        return elapsed

    def last_triggered_step(self) -> int | None:
        """Returns the step of the last trigger.

        Returns:
            The step number, or None if it never triggered.
        """
        return self._last_step


class SynchronizedTimer(SecondOrStepTimer):
    """Timer that triggers at the same step on all processes in lockstep.

    All processes must call it with the same steps. The first process's clock decides. It also
    chooses the step of the next synchronization, so processes don't wait after every step.
    """

    def reset(self) -> None:
        """Forgets the last trigger: the next step triggers."""
        super().reset()
        self._synced_step: int | None = None
        self._synced_at_s = 0.0
        self._next_step = 0

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns True if a step should trigger. Call on every process."""
        is_due = super().should_trigger_for_step(step)
        if self._every_steps is not None or current_group() is None:
            return is_due
        if step < self._next_step:
            return False
        proposal = {"is_due": is_due, "steps": self._steps_until_next(step)}
        decision = host.broadcast_object(proposal, name="whether a hook is due")
        self._next_step = step + decision["steps"]
        return decision["is_due"]

    def _steps_until_next(self, step: int) -> int:
        now_s, before, steps = self._clock(), self._synced_at_s, 1
        if self._synced_step is not None and now_s > before:
            steps = int((step - self._synced_step) * _SYNC_EVERY_S / (now_s - before))
        self._synced_step, self._synced_at_s = step, now_s
        return min(max(steps, 1), _MAX_STEPS_BETWEEN_SYNCS)


# GlobalStepWaiterHook: delayed start of a worker.

_logger = logging.getLogger(__name__)

_POLL_EVERY_S = 0.5


class GlobalStepWaiterHook(SessionRunHook):
    """Waits before the first step until the global step reaches a number.

    For independent workers with parameter servers. In lockstep the global step cannot advance
    while one worker waits.

    Args:
        wait_until_step: the global step to wait for.
        timeout_s: the longest time without progress, in seconds; None for
            `STRATAGEM_JOIN_TIMEOUT_S`.
        clock: returns the time in seconds.
        sleep: waits for a number of seconds.

    Raises:
        DeadlineExceededError: in `before_run`, if the global step does not advance in time.

    Example:
        >>> hook = sg.estimator.GlobalStepWaiterHook(wait_until_step=100)

    Source: TF 2.21 basic_session_run_hooks.py, GlobalStepWaiterHook.
    """

    def __init__(
        self,
        wait_until_step: int,
        *,
        timeout_s: float | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._wait_until_step = wait_until_step
        self._timeout_s = settings.read("join_timeout_s") if timeout_s is None else timeout_s
        self._clock = clock
        self._sleep = sleep
        self._has_started = False

    def begin(self) -> None:
        """Makes the next run wait again."""
        self._has_started = False

    def before_run(self, run_context: SessionRunContext) -> None:
        """Waits before the first step."""
        if self._has_started:
            return
        self._has_started = True
        step, since_s = run_context.session.global_step, self._clock()
        if step < self._wait_until_step:
            _logger.info("Waiting at global step %d for %d.", step, self._wait_until_step)
        while step < self._wait_until_step:
            self._sleep(_POLL_EVERY_S)
            before, step = step, run_context.session.global_step
            if step != before:
                since_s = self._clock()
            elif self._clock() - since_s >= self._timeout_s:
                raise DeadlineExceededError(
                    explain(
                        f"The global step stayed at {step} for {self._timeout_s:g} s.",
                        expected=f"other workers to advance it to {self._wait_until_step}.",
                        fix="check that the other workers train; or raise timeout_s or "
                        "STRATAGEM_JOIN_TIMEOUT_S.",
                    )
                )


# LoggingTensorHook: periodic logging of step values.


class LoggingTensorHook(SessionRunHook):
    """Logs values every N steps, every N seconds, or at the end.

    Writes to the logger `stratagem.estimator` at level INFO;
    `logging.basicConfig(level="INFO")` shows it.

    Args:
        tensors: a dict from tags to names or model function values; or names, used as tags.
        every_n_iter: steps of this process between log lines; the first step is logged.
        every_n_secs: seconds between log lines.
        at_end: True to also log after the last step. Without an interval, only then.
        formatter: turns the dict of values into a log line.
        clock: returns the time in seconds.

    Attributes:
        tensors: a dict from tags to names or values.

    Raises:
        ValueError: if both intervals are set, neither is set without `at_end`, or `every_n_iter`
            is below 1.

    Example:
        >>> hook = sg.estimator.LoggingTensorHook({"loss": "loss"}, every_n_iter=100)
        >>> hook.tensors
        {'loss': 'loss'}

    Source: TF 2.21 basic_session_run_hooks.py, LoggingTensorHook.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[str],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        check_one_of(
            "LoggingTensorHook",
            is_required=not at_end,
            every_n_iter=every_n_iter,
            every_n_secs=every_n_secs,
        )
        check_number("LoggingTensorHook", or_none=True, every_n_iter=every_n_iter)
        if isinstance(tensors, Mapping):
            self.tensors: dict[str, Any] = {tag: tensors[tag] for tag in sorted(tensors)}
        else:
            self.tensors = {name: name for name in tensors}
        self._formatter = formatter
        self._at_end = at_end
        self._timer = None
        if every_n_iter is not None or every_n_secs is not None:
            self._timer = SecondOrStepTimer(every_n_secs, every_n_iter, clock=clock)
        self._num_steps = 0
        self._is_due = False

    def begin(self) -> None:
        """Resets the timer and the step count."""
        if self._timer is not None:
            self._timer.reset()
        self._num_steps = 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetches the values when due."""
        timer = self._timer
        self._is_due = timer is not None and timer.should_trigger_for_step(self._num_steps)
        return SessionRunArgs(self.tensors) if self._is_due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the fetched values."""
        if self._is_due:
            self._log(run_values.results)
        self._num_steps += 1

    def end(self, session: Session) -> None:
        """Logs the values of the last step if `at_end` is set."""
        if self._at_end:
            self._log(session.run(self.tensors))

    def _log(self, values: dict[str, Any]) -> None:
        elapsed_s = None
        if self._timer is not None:
            elapsed_s, _ = self._timer.update_last_triggered_step(self._num_steps)
        if self._formatter is not None:
            _logger.info("%s", self._formatter(values))
            return
        with np.printoptions(suppress=True):
            line = ", ".join(f"{tag} = {values[tag]}" for tag in self.tensors)
        _logger.info("%s", line if elapsed_s is None else f"{line} ({elapsed_s:.3f} sec)")


# NanTensorHook: stops training when the loss becomes NaN.


class NanLossDuringTrainingError(RuntimeError):
    """Raised when the training loss becomes NaN.

    Example:
        >>> def model_fn(features, labels, mode):
        ...     loss = keras.ops.mean(features) * sg.Variable(1.0)
        ...     op = sg.estimator.minimize(keras.optimizers.SGD(0.1), loss)
        ...     return sg.estimator.EstimatorSpec(mode, loss=loss, train_op=op)
        >>> data = lambda: (np.float32([np.nan]), None)
        >>> try:
        ...     sg.estimator.Estimator(model_fn).train(
        ...         data, steps=1, hooks=[sg.estimator.NanTensorHook("loss")])
        ... except sg.estimator.NanLossDuringTrainingError as error:
        ...     print(str(error).splitlines()[0])
        The loss became NaN at global step 1.

    Source: TF 2.21 basic_session_run_hooks.py, NanLossDuringTrainingError.
    """


class NanTensorHook(SessionRunHook):
    """Checks the loss for NaN after each step. This makes the loop wait for each step.

    Args:
        loss_tensor: a name or a model function value.
        fail_on_nan_loss: True to raise an error, False to stop training.

    Attributes:
        tensors: a dict from "loss" to `loss_tensor`.

    Raises:
        NanLossDuringTrainingError: in `after_run`, if the loss is NaN.

    Example:
        >>> hook = sg.estimator.NanTensorHook("loss", fail_on_nan_loss=False)

    Source: TF 2.21 basic_session_run_hooks.py, NanTensorHook.
    """

    def __init__(self, loss_tensor: object, fail_on_nan_loss: bool = True) -> None:
        self.tensors = {"loss": loss_tensor}
        self._fails = fail_on_nan_loss

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs:
        """Fetches the loss."""
        return SessionRunArgs(self.tensors)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Raises an error or stops training if the loss is NaN."""
        if not np.any(np.isnan(run_values.results["loss"])):
            return
        step = run_context.session.global_step
        if self._fails:
            raise NanLossDuringTrainingError(
                explain(
                    f"The loss became NaN at global step {step}.",
                    expected="a finite loss.",
                    fix="lower the learning rate, clip gradients, or check features and labels "
                    "for NaN; fail_on_nan_loss=False stops training without an error.",
                    code="SG903",
                )
            )
        _logger.warning("The loss became NaN at global step %d: stopping training.", step)
        run_context.request_stop()


# FinalOpsHook: values of the last step.


class FinalOpsHook(SessionRunHook):
    """Fetches values of the last step.

    Args:
        final_ops: a structure of names and model function values; None for nothing.
        final_ops_feed_dict: must be None; there are no placeholders.

    Attributes:
        tensors: the leaves of `final_ops` by path.
        final_ops_values: NumPy values once the loop has ended; None before.

    Raises:
        NotImplementedError: if `final_ops_feed_dict` is set.

    Example:
        >>> hook = sg.estimator.FinalOpsHook({"loss": "loss"})
        >>> hook.final_ops_values is None
        True

    Source: TF 2.21 basic_session_run_hooks.py, FinalOpsHook.
    """

    def __init__(self, final_ops: object, final_ops_feed_dict: object = None) -> None:
        check_unsupported("final_ops_feed_dict", final_ops_feed_dict)
        self._final_ops = final_ops
        leaves = jax.tree_util.tree_leaves_with_path(final_ops)
        self.tensors = {f"final{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
        self.final_ops_values: Any = None

    def end(self, session: Session) -> None:
        """Fetches the values."""
        if self._final_ops is not None:
            self.final_ops_values = session.run(self._final_ops)
