"""FinalOpsHook and FeedFnHook: values of the last step."""

from __future__ import annotations

from typing import Any

import jax

from stratagem.errors import explain
from stratagem.estimator.hooks.session_run_hook import Session, SessionRunHook


class FinalOpsHook(SessionRunHook):
    """Fetches values of the last step.

    Args:
        final_ops: a structure of names and model function values; None for nothing.
        final_ops_feed_dict: must be None; there are no placeholders.

    Attributes:
        tensors: the leaves of `final_ops` by path.

    Raises:
        NotImplementedError: if `final_ops_feed_dict` is set.

    Example:
        >>> hook = sg.estimator.FinalOpsHook({"loss": "loss"})
        >>> hook.final_ops_values is None
        True

    Source: TF 2.21 basic_session_run_hooks.py, FinalOpsHook.
    """

    def __init__(self, final_ops: object, final_ops_feed_dict: object = None) -> None:
        if final_ops_feed_dict is not None:
            raise NotImplementedError(
                explain(
                    f"final_ops_feed_dict={final_ops_feed_dict!r} is not supported.",
                    expected="None: there are no placeholders to feed.",
                    fix="return the value from input_fn as a feature.",
                )
            )
        self._final_ops = final_ops
        leaves = jax.tree_util.tree_leaves_with_path(final_ops)
        self.tensors = {f"final{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}
        self._values: Any = None

    @property
    def final_ops_values(self) -> Any:
        """NumPy values once the loop has ended; None before."""
        return self._values

    def end(self, session: Session) -> None:
        """Fetches the values."""
        if self._final_ops is not None:
            self._values = session.run(self._final_ops)


class FeedFnHook(SessionRunHook):
    """Unsupported: there are no placeholders to feed.

    Args:
        feed_fn: any value.

    Raises:
        NotImplementedError: always.

    Example:
        >>> try:
        ...     sg.estimator.FeedFnHook(lambda: {"x": 1.0})
        ... except NotImplementedError as error:
        ...     print(str(error).splitlines()[-1])
        Fix: return the values from input_fn as features.

    Source: TF 2.21 basic_session_run_hooks.py, FeedFnHook.
    """

    def __init__(self, feed_fn: object) -> None:
        raise NotImplementedError(
            explain(
                f"FeedFnHook({feed_fn!r}) is not supported: there are no placeholders.",
                expected="values that the model function receives as features.",
                fix="return the values from input_fn as features.",
            )
        )
