"""Warning about a Keras distribution that a strategy ignores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras

from stratagem.logs import warn_on_one_worker
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


_warned_of: set[str] = set()


def warn_of_other_distribution(strategy: Strategy) -> None:
    """Warns, once per kind, about a Keras distribution that the strategy's scope ignores."""
    distribution = keras.distribution.distribution()
    if distribution is None or (kind := type(distribution).__name__) in _warned_of:
        return
    _warned_of.add(kind)
    warn_on_one_worker(
        explain(
            f"keras.distribution.{kind} is current in the scope of {strategy}, and is ignored.",
            expected="one of both: a strategy places variables and splits batches itself.",
            fix="leave out keras.distribution; for layouts of single variables pass layout_map= to "
            "the strategy.",
            code="SG208",
        ),
        RuntimeWarning,
        stacklevel=2,
    )
