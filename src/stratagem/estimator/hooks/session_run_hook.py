"""What a hook is, and what it is told: code that runs on the host between steps."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

from stratagem.messages import explain

__all__ = [
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
]


@runtime_checkable
class Session(Protocol):
    """What a hook sees of the loop that calls it.

    Args:
        mode: one of `ModeKeys`.
        model_dir: the folder of checkpoints and summaries.
        is_chief: whether this process is the one that writes.
        num_workers: how many processes run this loop together.
    """

    mode: str
    model_dir: str
    is_chief: bool
    num_workers: int

    @property
    def global_step(self) -> int:
        """How many steps the model has been trained, the last finished one included."""
        ...

    @property
    def summary_writer(self) -> Any:
        """The writer of `model_dir`; None on all processes but the chief."""
        ...

    def run(self, fetches: Any) -> Any:
        """Returns values of the last finished step.

        Args:
            fetches: a structure of names ("loss", "global_step", those given to
                `sg.estimator.identity`, paths of variables), of variables, and of values of the
                model function.

        Returns:
            The same structure of NumPy values.
        """
        ...

    def save_checkpoint(self) -> str:
        """Saves what was trained; all processes of a cluster have to call it.

        Returns:
            The path of the checkpoint.
        """
        ...


@dataclasses.dataclass(frozen=True)
class SessionRunArgs:
    """What a hook asks for before a step.

    Args:
        fetches: a structure as `Session.run` takes it: its values after the step come back in
            `SessionRunValues.results`.
        feed_dict: accepted as None only: there is no graph that could be fed.
        options: accepted and not used.

    Raises:
        NotImplementedError: a `feed_dict`.

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
                    f"A hook feeds {self.feed_dict!r} to the step.",
                    expected="no feed_dict: there is no graph, and so no placeholder to feed.",
                    fix="let input_fn give the value as a feature.",
                )
            )


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """What a hook gets after a step.

    Args:
        results: the values for the hook's own fetches, in the same structure; None where it asked
            for none.
        options: None.
        run_metadata: None.

    Source: TF 2.21 session_run_hook.py, SessionRunValues.
    """

    results: Any
    options: Any = None
    run_metadata: Any = None


class SessionRunContext:
    """The step that a hook is called for, and the means to end training with it.

    Args:
        original_args: what the loop itself asks for.
        session: the loop.

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
        """What the loop itself asks for in this step."""
        return self._original_args

    @property
    def session(self) -> Session:
        """The loop."""
        return self._session

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has asked for the end."""
        return self._stop_requested

    def request_stop(self) -> None:
        """Ends the loop when all hooks have been called for this step."""
        self._stop_requested = True


class SessionRunHook:
    """Code that a loop calls on the host, at its begin, around each step and at its end.

    Override what is needed. What a hook asks for in `before_run` is fetched from the devices for
    that step alone: a loop none of whose hooks asks never waits for them.

    Example:
        >>> class Counter(sg.estimator.SessionRunHook):
        ...     steps = 0
        ...     def after_run(self, run_context, run_values):
        ...         self.steps += 1

    Source: TF 2.21 session_run_hook.py, SessionRunHook.
    """

    def begin(self) -> None:
        """Called once, before the variables are made or restored."""

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Called once, when all variables have their values.

        Args:
            session: the loop.
            coord: None; TensorFlow passes a coordinator of its threads here.
        """

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Called before each step.

        Args:
            run_context: the step.

        Returns:
            What to fetch of it; None for nothing.
        """

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Called after each step.

        Args:
            run_context: the step.
            run_values: what `before_run` has asked for.
        """

    def end(self, session: Session) -> None:
        """Called once, after the last step; not where the loop ended with an error.

        Args:
            session: the loop.
        """
