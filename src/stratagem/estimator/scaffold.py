"""Scaffold: initialization and custom saving of a training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from stratagem.estimator.hooks.session_run_hook import Session
from stratagem.messages import explain


class Saver(Protocol):
    """Saves checkpoints instead of the session; any object with this method works."""

    def save(self, session: Session, /) -> str:
        """Returns the path of the checkpoint."""
        ...


class Scaffold:
    """Runs a function once the variables are initialized, and can replace the saver.

    The other parts of TensorFlow's scaffold are graph operations and don't exist here: the
    Estimator saves checkpoints, writes summaries and checks that variables are initialized.

    Args:
        init_fn: called with this scaffold and the session after the variables are created, unless
            training resumes from a checkpoint.
        saver: an object whose `save(session)` returns the path of the checkpoint.
            `CheckpointSaverHook` calls it instead of the session.

    Raises:
        TypeError: if `init_fn` is not callable, or `saver` has no `save` method.

    Example:
        >>> scaffold = sg.estimator.Scaffold(init_fn=lambda scaffold, session: print("start"))
        >>> scaffold.saver is None
        True

    Source: TF 2.21 monitored_session.py, Scaffold.
    """

    def __init__(
        self,
        init_fn: Callable[[Scaffold, Session], Any] | None = None,
        saver: Saver | None = None,
    ) -> None:
        if init_fn is not None and not callable(init_fn):
            raise TypeError(
                explain(
                    f"init_fn={init_fn!r} is not callable.",
                    expected="a function of the scaffold and the session.",
                    fix="pass lambda scaffold, session: ...",
                )
            )
        if saver is not None and not callable(getattr(saver, "save", None)):
            raise TypeError(
                explain(
                    f"saver={saver!r} has no `save` method.",
                    expected="an object whose save(session) returns a path.",
                    fix="omit saver: the session then saves all variables.",
                )
            )
        self._init_fn = init_fn
        self.saver = saver

    def init_fn(self, session: Session) -> None:
        """Calls the `init_fn` passed to the constructor, if any.

        Args:
            session: the training session.
        """
        if self._init_fn is not None:
            self._init_fn(self, session)
