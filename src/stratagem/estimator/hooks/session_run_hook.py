"""SessionRunHook and the sessions, arguments and values it receives."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

from stratagem.errors import explain


@runtime_checkable
class Session(Protocol):
    """Training, evaluation or prediction loop, as hooks see it."""

    mode: str
    model_dir: str
    is_chief: bool
    num_workers: int

    @property
    def global_step(self) -> int:
        """Number of steps trained, including the last finished one."""
        ...

    @property
    def summary_writer(self) -> Any:
        """Summary writer of `model_dir`; None except on the chief."""
        ...

    def run(self, fetches: object) -> Any:
        """Returns values of the last finished step."""
        ...

    def save_checkpoint(self) -> str:
        """Saves all variables and returns the path. Call on every process."""
        ...


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
        if self.feed_dict is not None:
            raise NotImplementedError(
                explain(
                    f"feed_dict={self.feed_dict!r} is not supported.",
                    expected="None: there are no placeholders to feed.",
                    fix="return the value from input_fn as a feature.",
                )
            )


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


class SessionRunContext:
    """Step that a hook is called for, with a way to stop the loop.

    Args:
        original_args: the values that the loop itself requests.
        session: the session.

    Example:
        >>> context = sg.estimator.SessionRunContext(sg.estimator.SessionRunArgs(None), None)
        >>> context.request_stop()
        >>> context.stop_requested
        True

    Source: TF 2.21 session_run_hook.py, SessionRunContext.
    """

    def __init__(self, original_args: SessionRunArgs, session: Session) -> None:
        self._original_args = original_args
        self._session = session
        self._stop_requested = False

    @property
    def original_args(self) -> SessionRunArgs:
        """Values that the loop itself requests from this step."""
        return self._original_args

    @property
    def session(self) -> Session:
        """The session."""
        return self._session

    @property
    def stop_requested(self) -> bool:
        """True if a hook requested a stop."""
        return self._stop_requested

    def request_stop(self) -> None:
        """Stops the loop after all hooks have been called for this step."""
        self._stop_requested = True


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
        if (num_steps is None) == (last_step is None):
            raise ValueError(
                explain(
                    f"StopAtStepHook received num_steps={num_steps} and last_step={last_step}.",
                    expected="exactly one of the two.",
                    fix="pass num_steps for additional steps, or last_step for a global step.",
                )
            )
        self._num_steps = num_steps
        self._last_step = last_step

    def after_create_session(self, session: Session, coord: object) -> None:
        """Computes the last step."""
        if self._last_step is None:
            assert self._num_steps is not None
            self._last_step = session.global_step + self._num_steps

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Requests a stop at the last step."""
        assert self._last_step is not None
        if run_context.session.global_step >= self._last_step:
            run_context.request_stop()
