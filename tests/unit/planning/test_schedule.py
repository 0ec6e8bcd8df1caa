"""Messages and overlap read from hand-written schedules."""

from __future__ import annotations

import pytest

from stratagem.planning.schedule import Reduction, Schedule, share_behind

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
        ("jvp(dense)", "between", ("dot.1",)),
        ("transpose(jvp(dense))", "after", ()),
    ],
)
def test_only_products_while_a_sum_travels_count(place, where, behind) -> None:
    texts = {"between": "", "after": "", where: _FUSION}
    schedule = Schedule(_PROGRAM.format(place=place, **texts))
    reductions = schedule.reductions()
    assert schedule.is_scheduled
    assert reductions == [
        Reduction("all-reduce-start.2", 128, behind),
        Reduction("all-reduce.3", 36, ()),
    ]
    assert share_behind(reductions) == pytest.approx(128 / 164 if behind else 0)


@pytest.mark.parametrize(
    ("target", "behind"),
    [("__cudnn$convBackwardFilter", ("conv.1",)), ("__cublas$gemm", ("conv.1",)), ("Sharding", ())],
)
def test_products_of_libraries_count(target, behind) -> None:
    call = (
        f'%conv.1 = (f32[8]{{0}}, u8[0]{{0}}) custom-call(%x), custom_call_target="{target}",'
        ' metadata={op_name="jit(step)/transpose(jvp(conv))/conv_general_dilated"}'
    )
    program = _PROGRAM.format(place="", between=call, after="")
    assert Schedule(program).reductions()[0].behind == behind


def _of(line: str) -> Reduction:
    text = f"ENTRY %main (x: f32[8]) -> f32[8] {{\n  {line}\n}}\n"
    (found,) = Schedule(text).reductions()
    return found


@pytest.mark.parametrize(
    ("line", "kind", "num_bytes", "groups"),
    [
        # The whole scattered array counts; each of the four devices keeps a part of it.
        (
            "%rs = f32[2]{0} reduce-scatter(%x), replica_groups={{0,1,2,3},{4,5,6,7}}",
            "reduce-scatter",
            32,
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "%ag = f32[8]{0} all-gather(%x), replica_groups=[2,4]<=[8], dimensions={0}",
            "all-gather",
            32,
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        (
            "%s = (f32[8]{0}, f32[2]{0}) reduce-scatter-start(%x), replica_groups=[1,4]<=[4]",
            "reduce-scatter",
            32,
            ((0, 1, 2, 3),),
        ),
        # The type of what starts a gathering holds what goes in, too.
        (
            "%s = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4]",
            "all-gather",
            32,
            ((0, 1, 2, 3),),
        ),
        (
            "%ar = s8[5]{0:T(128)} all-reduce(%x), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%a",
            "all-reduce",
            5,
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        (
            "%cp = bf16[6]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}",
            "collective-permute",
            12,
            (),
        ),
        (
            "%ag = f32[8]{0} all-gather(%x), replica_groups=mesh['a'=4,'b'=1] {'a'}",
            "all-gather",
            32,
            ((0, 1, 2, 3),),
        ),
        (
            "%ar = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4] {'a'}, to_apply=%a",
            "all-reduce",
            32,
            ((0, 4), (1, 5), (2, 6), (3, 7)),
        ),
        (
            "%ar = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=8] {'a':(2)2}, to_apply=%a",
            "all-reduce",
            32,
            ((0, 2), (1, 3), (4, 6), (5, 7)),
        ),
    ],
)
def test_kinds_of_messages(line, kind, num_bytes, groups) -> None:
    found = _of(line)
    assert (found.kind, found.num_bytes, found.groups) == (kind, num_bytes, groups)
    assert (found.times, found.behind) == (1, ())


def test_a_message_in_a_loop_counts_as_often_as_the_loop_runs() -> None:
    text = """
%body (x: f32[8]) -> f32[8] {
  %all-reduce.1 = f32[8]{0} all-reduce(%x), to_apply=%add
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %w = f32[8]{0} while(%x), body=%body, backend_config={"known_trip_count":{"n":"12"}}
}
"""
    (found,) = Schedule(text).reductions()
    assert (found.times, found.num_bytes) == (12, 32)


def test_what_a_tpu_sends_to_other_slices() -> None:
    found = _of(
        "%send = (f32[64,8]{1,0:T(8,128)}, u32[], token[]) send(%x, %after), is_host_transfer=true,"
        ' frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    assert (found.kind, found.num_bytes, found.leaves_slice) == ("all-reduce", 2048, True)


def test_bytes_of_operations_and_of_all_they_are_given() -> None:
    text = """
ENTRY %main (x: f32[8], y: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[8]{0} parameter(1)
  %sum = f32[8]{0} add(%x, %y)
  %half = bf16[8]{0} fusion(%sum), kind=kLoop, calls=%f
  ROOT %t = (f32[8]{0}, bf16[8]{0}) tuple(%sum, %half)
}
"""
    assert Schedule(text).accessed_bytes() == 3 * 32 + (32 + 16)


def test_program_without_messages() -> None:
    schedule = Schedule("ENTRY %main (x: f32[8]) -> f32[8] {\n}\n")
    assert schedule.reductions() == []
    assert not schedule.is_scheduled
    assert share_behind([]) == 0


_BRANCHING = """
%small (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %all-reduce.1 = f32[8]{{0}} all-reduce(%p), to_apply=%add
}}

%large (q: f32[8]) -> f32[8] {{
  %q = f32[8]{{0}} parameter(0)
  %all-reduce.2 = f32[8]{{0}} all-reduce(%q), to_apply=%add
  ROOT %all-reduce.3 = f32[8]{{0}} all-reduce(%all-reduce.2), to_apply=%add
}}

ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {{
  %i = s32[] parameter(0)
  %x = f32[8]{{0}} parameter(1)
  ROOT %c = f32[8]{{0}} conditional(%i, %x, %x), {branches}, {metadata}
}}
"""


@pytest.mark.parametrize(
    "branches",
    [
        "branch_computations={%small, %large}",
        "true_computation=%large, false_computation=%small",
        "true_computation=%small, false_computation=%large",
    ],
)
@pytest.mark.parametrize(
    ("scope", "times"), [("", 1), ("synchronized_every_20_steps/", 0.05), ("every_20_steps/", 1)]
)
def test_the_branch_that_sends_most_counts_as_often_as_its_scope_says(
    branches, scope, times
) -> None:
    metadata = f'metadata={{op_name="jit(f)/{scope}cond"}}'
    schedule = Schedule(_BRANCHING.format(branches=branches, metadata=metadata))
    assert schedule.reductions() == [
        Reduction("all-reduce.2", 32, (), times=times),
        Reduction("all-reduce.3", 32, (), times=times),
    ]
    # Both sums read and write 32 bytes each.
    assert schedule.accessed_bytes() == round(4 * 32 * times)
