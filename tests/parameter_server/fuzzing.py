"""Damaged and forged bytes for fuzz tests of parsers.

`FUZZ_EXAMPLES` is the number of examples of each test: few in the suite, millions in a campaign.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

__all__ = ["FUZZ", "JSON", "damaged"]

FUZZ = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "200")),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
_NUMBERS = st.integers() | st.sampled_from([-1, 0, 1, 2**31, 2**32, 2**63, 2**64]) | st.floats()
_LEAVES = st.none() | st.booleans() | _NUMBERS | st.text(max_size=9)
JSON = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Data that was cut, in which bits flipped, or parts were lost, doubled or replaced."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(changed)))
        end = min(len(changed), begin + draw(st.integers(0, 40)))
        match draw(st.sampled_from(["cut", "flip", "flip", "lose", "double", "replace", "zero"])):
            case "cut":
                del changed[begin:]
            case "flip" if begin < len(changed):
                changed[begin] ^= 1 << draw(st.integers(0, 7))
            case "lose":
                del changed[begin:end]
            case "double":
                changed[begin:begin] = changed[begin:end]
            case "replace":
                changed[begin:end] = draw(st.binary(max_size=40))
            case "zero":
                changed[begin:end] = bytes(end - begin)
            case _:
                pass
    return bytes(changed)
