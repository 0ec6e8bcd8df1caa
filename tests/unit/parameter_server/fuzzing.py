"""Damaged bytes for fuzz tests of parsers."""

from __future__ import annotations

from hypothesis import strategies as st

__all__ = ["damaged"]


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
