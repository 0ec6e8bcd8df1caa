"""What is read from a schedule, on one written by hand."""

from __future__ import annotations

import pytest

from tests.programs.schedule import Reduction, Schedule, share_behind

_PROGRAM = """
HloModule jit_step, is_scheduled=true

%product (p: f32[4,8]) -> f32[4,8] {{
  %p = f32[4,8]{{1,0}} parameter(0)
  ROOT %dot.1 = f32[4,8]{{1,0}} dot(%p, %p), metadata={{op_name="jit(step)/{place}/dot_general"}}
}}

ENTRY %main (x: f32[4,8]) -> f32[4,8] {{
  %x = f32[4,8]{{1,0}} parameter(0)
  %all-reduce-start.2 = f32[4,8]{{1,0}} all-reduce-start(%x), to_apply=%add
  {between}
  %all-reduce-done = f32[4,8]{{1,0}} all-reduce-done(%all-reduce-start.2)
  {after}
  ROOT %all-reduce.3 = (bf16[16]{{0}}, f32[]) all-reduce(%x, %x), to_apply=%add
}}
"""
_FUSION = "%fusion.1 = f32[4,8]{1,0} fusion(%x), kind=kCustom, calls=%product"


@pytest.mark.parametrize(
    ("place", "where", "behind"),
    [
        ("transpose(jvp(dense))", "between", ("dot.1",)),
        ("jvp(dense)", "between", ()),
        ("transpose(jvp(dense))", "after", ()),
    ],
)
def test_only_products_of_the_backward_pass_while_a_sum_travels_count(place, where, behind) -> None:
    texts = {"between": "", "after": "", where: _FUSION}
    reductions = Schedule(_PROGRAM.format(place=place, **texts)).reductions()
    assert reductions == [
        Reduction("all-reduce-start.2", 128, behind),
        Reduction("all-reduce.3", 36, ()),
    ]
    assert share_behind(reductions) == pytest.approx(128 / 164 if behind else 0)
