"""What programs exchange, against values by hand."""

from __future__ import annotations

import pytest

from benchmarks.collectives import Array, Collective, collectives_in

# As XLA:CPU has written them.
PROGRAM = """
  %all_gather.3 = s32[2,512,8]{2,1,0} all-gather(%ids), channel_id=1, replica_groups={{0,1}}
  %all-reduce = (f32[512,128]{1,0}, f32[8449]{0}) all-reduce(%dot.2, %negate), channel_id=1
  %get-tuple-element.18 = f32[512,128]{1,0} get-tuple-element(%all-reduce), index=0
  ROOT %reduce_scatter.7 = f32[1,512,8,64]{3,2,1,0} reduce-scatter(%rows), dimensions={0}
"""


def test_collectives_are_found_with_their_names() -> None:
    gather, reduce, scatter = collectives_in(PROGRAM)
    assert (gather.name, gather.kind, gather.num_bytes) == ("all_gather.3", "all-gather", 32768)
    assert reduce.arrays == (Array(512 * 128 * 4, "f32"), Array(8449 * 4, "f32"))
    assert (scatter.name, scatter.kind) == ("reduce_scatter.7", "reduce-scatter")


@pytest.mark.parametrize(
    ("kind", "result_bytes", "num_devices", "moved_bytes"),
    [
        # Each of two sends half of what it adds to, and half of the sums.
        ("all-reduce", 100, 2, 200),
        ("all-reduce", 100, 4, 600),
        # Each of four gets what the other three have.
        ("all-gather", 400, 4, 1200),
        # Each of four gets three parts to add to its own.
        ("reduce-scatter", 100, 4, 1200),
        ("all-to-all", 100, 2, 100),
        ("all-reduce", 100, 1, 0),
    ],
)
def test_bytes_are_those_that_have_to_move(
    kind: str, result_bytes: int, num_devices: int, moved_bytes: int
) -> None:
    one = Collective("x", kind, (Array(result_bytes, "s8"),), "x")
    assert one.moved_bytes(num_devices) == moved_bytes


@pytest.mark.parametrize(
    "line",
    [
        "%x = f32[8]{0} collective-permute(%y), source_target_pairs={{0,1}}",
        "%x = (f32[4]{0}, f32[8]{0}) all-gather-start(%y), dimensions={0}",
    ],
)
def test_what_is_not_known_is_refused(line: str) -> None:
    (found,) = collectives_in(line)
    with pytest.raises(ValueError, match="Teach `Collective` what it moves"):
        found.moved_bytes(2)
