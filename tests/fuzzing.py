"""Number of examples of the fuzz tests: few in a normal run, as many as wanted in a campaign.

FUZZ_EXAMPLES=100000 pytest -k fuzzed runs them alone; an example has up to 20 frames.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

__all__ = ["JSON", "fuzz"]

JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)
"""Any JSON value."""


def fuzz(test: Callable[..., Any]) -> Callable[..., Any]:
    """A test of a parser that reads a socket; its fixtures must be safe to use again."""
    limits = settings(
        max_examples=int(os.environ.get("FUZZ_EXAMPLES", "100")),
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    limited = limits(test)
    vars(limited)["fuzzed"] = True  # `pytest -k` looks at attributes, too
    return limited
