"""What a model function adds to the start of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.estimator.hooks.session_run_hook import Session
from stratagem.messages import explain

__all__ = ["Scaffold"]


class Scaffold:
    """What is to be done once, when variables have their first values.

    There is no graph, and so none of the operations that TensorFlow's scaffold holds: checkpoints,
    summaries and the checks that all variables have values are the Estimator's.

    Args:
        init_fn: called with this scaffold and the session when the variables are made, where
            training does not continue from a checkpoint.
        saver: what `CheckpointSaverHook` saves with instead of the session: an object whose
            `save(session)` returns the path of the checkpoint.

    Raises:
        TypeError: `init_fn` cannot be called, or `saver` has no `save`.

    Example:
        >>> scaffold = sg.estimator.Scaffold(init_fn=lambda scaffold, session: print("start"))
        >>> scaffold.saver is None
        True

    Source: TF 2.21 monitored_session.py, Scaffold.
    """

    def __init__(
        self,
        init_fn: Callable[[Scaffold, Session], Any] | None = None,
        saver: Any = None,
    ) -> None:
        if init_fn is not None and not callable(init_fn):
            raise TypeError(
                explain(
                    f"init_fn={init_fn!r} cannot be called.",
                    expected="a function that takes the scaffold and the session.",
                    fix="pass lambda scaffold, session: ...",
                )
            )
        if saver is not None and not callable(getattr(saver, "save", None)):
            raise TypeError(
                explain(
                    f"saver={saver!r} has no method `save`.",
                    expected="an object whose save(session) returns a path.",
                    fix="leave saver out: the session saves everything that was trained.",
                )
            )
        self._init_fn = init_fn
        self.saver = saver

    def init_fn(self, session: Session) -> None:
        """Calls the function that was given, if there is one.

        Args:
            session: of the training that begins.
        """
        if self._init_fn is not None:
            self._init_fn(self, session)
