"""Values of the last step."""

from __future__ import annotations

from typing import Any

import jax

from stratagem.estimator.hooks.session_run_hook import Session, SessionRunHook
from stratagem.messages import explain

__all__ = ["FeedFnHook", "FinalOpsHook"]


class FinalOpsHook(SessionRunHook):
    """Keeps values of the last step.

    Args:
        final_ops: a structure of names and of values of the model function; None for nothing.
        final_ops_feed_dict: None; there is nothing to feed.

    Attributes:
        tensors: the leaves of the structure, by their place.

    Raises:
        NotImplementedError: a `final_ops_feed_dict`.

    Example:
        >>> hook = sg.estimator.FinalOpsHook({"loss": "loss"})
        >>> hook.final_ops_values is None
        True

    Source: TF 2.21 basic_session_run_hooks.py, FinalOpsHook.
    """

    def __init__(self, final_ops: Any, final_ops_feed_dict: Any = None) -> None:
        if final_ops_feed_dict is not None:
            raise NotImplementedError(
                explain(
                    f"final_ops_feed_dict={final_ops_feed_dict!r} would be fed to operations.",
                    expected="None: there is no graph, and so no placeholder to feed.",
                    fix="let input_fn give the value as a feature.",
                )
            )
        self._final_ops = final_ops
        leaves = jax.tree_util.tree_leaves_with_path(final_ops)
        self.tensors = {f"final{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
        self._values: Any = None

    @property
    def final_ops_values(self) -> Any:
        """The values as NumPy arrays, when the loop has ended; None before."""
        return self._values

    def end(self, session: Session) -> None:
        """Fetches the values.

        Args:
            session: the loop.
        """
        if self._final_ops is not None:
            self._values = session.run(self._final_ops)


class FeedFnHook(SessionRunHook):
    """Not possible: there are no placeholders that could be fed.

    Args:
        feed_fn: any.

    Raises:
        NotImplementedError: always.

    Source: TF 2.21 basic_session_run_hooks.py, FeedFnHook.
    """

    def __init__(self, feed_fn: Any) -> None:
        raise NotImplementedError(
            explain(
                f"FeedFnHook would feed what {feed_fn!r} returns to placeholders.",
                expected="no placeholders: a model function gets all values as features.",
                fix="let input_fn give the values as features.",
            )
        )
