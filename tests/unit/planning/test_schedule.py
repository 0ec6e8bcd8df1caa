"""Messages and overlap read from hand-written schedules."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from stratagem.planning.schedule import (
    OperationCost,
    Reduction,
    Schedule,
    share_behind,
)
from stratagem.planning.step_time import (
    Assumptions,
    compute_s,
    for_any_size,
    message_s,
    operations_s,
    predict_scaling,
    predict_step,
)
from stratagem.planning.targets import ACCELERATORS, Target, parse_target
from stratagem.planning.traced_costs import product_flops

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
        # As the CPU compiler of jaxlib 0.10.2 writes a mesh of devices in another order.
        (
            "%ar = f32[8]{0} all-reduce(%x), replica_groups=mesh['a'=2,'b'=4], "
            "device_ids=([4,2]T(1,0)) {'a'}, to_apply=%a",
            "all-reduce",
            32,
            ((0, 1), (2, 3), (4, 5), (6, 7)),
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


def test_what_a_tpu_sends_to_other_slices() -> None:
    found = _of(
        "%send = (f32[64,8]{1,0:T(8,128)}, u32[], token[]) send(%x, %after), is_host_transfer=true,"
        ' frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    assert (found.kind, found.num_bytes, found.leaves_slice) == ("all-reduce", 2048, True)


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


# Predicted times, compared with formulas: all at its peak, and messages for their bytes alone.
_IDEAL = Assumptions(
    compute_share=1, memory_share=1, link_share=1, link_latency_s=0, network_latency_s=0
)


def _sum(num_bytes: int, behind: tuple[str, ...] = (), **fields) -> Reduction:
    return Reduction("all-reduce.1", num_bytes, behind, **fields)


@pytest.mark.parametrize(
    ("target", "fields", "seconds"),
    [
        # Over 450 GB/s: each device sends 2 x 7/8 of it.
        ("8xH100", {}, 2 * 7 / 8 / 450),
        # Two hosts send an eighth each over the network.
        ("16xH100", {}, 2 * 7 / 8 / 450 + 2 * 1 / 2 / 8 / 50),
        ("v5e:4x4", {"kind": "reduce-scatter"}, 15 / 16 / 200),  # half an all-reduce
        ("v5e:4x4", {"kind": "all-gather"}, 15 / 16 / 200),
        ("v5e:4x4", {"kind": "all-to-all"}, 15 / 16 / 200),
        # Groups say whether a message leaves its slice.
        ("2xv5e:2x2", {"groups": ((0, 1, 2, 3), (4, 5, 6, 7))}, 2 * 3 / 4 / 200),
        ("2xv5e:2x2", {"groups": ((0, 4), (1, 5), (2, 6), (3, 7))}, 2 * 1 / 2 / 3.125),
        ("8xH100", {"kind": "collective-permute"}, 1 / 450),  # one hop
        ("16xH100", {"kind": "collective-permute"}, 1 / 50),
        ("8xH100", {"times": 12}, 2 * 7 / 8 / 450),  # of one of them
        # A TPU sends to other slices what a chip has of the whole.
        ("2xv5e:2x2", {"leaves_slice": True}, 2 * 1 / 2 / 3.125),
        ("v5e:2x2", {"leaves_slice": True}, 0),
    ],
)
def test_time_of_a_gigabyte(target, fields, seconds) -> None:
    time_s = message_s(_sum(10**9, **fields), parse_target(target), _IDEAL)
    assert time_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "hops"), [("8xH100", 7), ("v5e:16x16", 30), ("v5p:2x2x1", 2), ("1xL4", 0)]
)
def test_hops_of_a_small_message(text, hops) -> None:
    """A ring of GPUs, and one along each axis of a slice."""
    assumed = Assumptions(link_latency_s=1)
    target = parse_target(text)
    assert target.num_hops == hops
    assert message_s(_sum(0), target, assumed) == 2 * hops


def test_groups_of_all_devices_grow_and_groups_of_a_host_stay() -> None:
    target = parse_target("16xH100")
    everyone = _sum(10**9, groups=(tuple(range(16)),))
    pairs = _sum(10**9, groups=tuple((first, first + 1) for first in range(0, 16, 2)))
    grown, stayed = for_any_size([everyone, pairs], target)
    larger = target.of_size(4096)
    assert message_s(grown, larger, _IDEAL) == message_s(_sum(10**9), larger, _IDEAL)
    assert message_s(stayed, larger, _IDEAL) == message_s(pairs, target, _IDEAL)


def test_groups_across_hosts_have_no_other_size() -> None:
    across = _sum(10**9, groups=tuple((first, first + 8) for first in range(8)))
    with pytest.raises(ValueError, match="groups of 2 devices of 2 hosts or slices, out of 16"):
        for_any_size([across], parse_target("16xH100"))


def test_computing_takes_products_and_bytes() -> None:
    """A petaFLOP in bfloat16 at half of 989.4 TFLOP/s, and 3.3523 TB at 0.8 of the rate."""
    times = compute_s(
        {"bfloat16": 1e15, "float32": 1e12}, 3352.3e9, parse_target("1xH100"), Assumptions()
    )
    assert times == pytest.approx((2 / 0.9894 + 2e-3 / 0.4947, 1 / 0.8), rel=1e-6)


def test_what_travels_behind_products_is_hidden_as_far_as_they_last() -> None:
    target = parse_target("8xH100")
    reductions = [_sum(9 * 10**9, ("dot.1",), times=5), _sum(45 * 10**9)]
    each_s = 2 * 7 / 8 * 45 / 450
    long = predict_step(target, reductions, 3.0, _IDEAL)
    assert long.reduction_s == pytest.approx(2 * each_s)
    assert long.hidden_s == pytest.approx(each_s)
    assert long.step_s == pytest.approx(3 + each_s)
    assert long.shortest_s == pytest.approx(3)
    assert long.efficiency == pytest.approx(3 / (3 + each_s))
    short = predict_step(target, reductions, 0.03, _IDEAL)  # two thirds of it are the backward pass
    assert short.hidden_s == pytest.approx(0.02)
    assert short.most_hidden_s == pytest.approx(0.02)


def test_scaling_from_one_device_to_all() -> None:
    times = predict_scaling(parse_target("16xH100"), [_sum(10**9)], 0.1, Assumptions())
    assert [time.num_devices for time in times] == [1, 2, 4, 8, 16]
    assert times[0].step_s == 0.1
    assert times[0].efficiency == 1
    efficiencies = [time.efficiency for time in times]
    assert efficiencies == sorted(efficiencies, reverse=True)
    # Two bytes over the link take half as long in a ring of 2 as in an endless one.
    assert times[1].reduction_s == pytest.approx(1e9 / (450e9 * 0.8) + 2 * 2e-6)


def test_a_message_within_replicas_is_there_on_any_number_of_them() -> None:
    """Pairs exchange, and the first of each pair with those of the others."""
    pairs = ((0, 1), (2, 3), (4, 5), (6, 7))
    firsts = ((0, 2, 4, 6), (1, 3, 5, 7))
    target = parse_target("8xH100")
    inside, between = _sum(10**9, groups=pairs), _sum(10**9, groups=firsts)
    times = predict_scaling(target, [inside, between], 1.0, _IDEAL, devices_per_replica=2)
    assert [time.num_devices for time in times] == [2, 4, 8]
    of_pair = 2 * 1 / 2 * 1e9 / 450e9
    for time, others in zip(times, (0, 2 * 1 / 2, 2 * 3 / 4), strict=True):
        assert time.reduction_s == pytest.approx(of_pair + others * 1e9 / 450e9)


def test_each_operation_is_bound_by_products_or_by_memory() -> None:
    """One takes 2 s of products and 1 s of memory, the other 1 s and 3 s, ten times."""
    rates = parse_target("1xH100").accelerator
    flops, num_bytes = rates.peak_flops_per_s("bfloat16"), rates.memory_bytes_per_s
    costs = [
        OperationCost("bfloat16", 2 * flops, int(num_bytes)),
        OperationCost("bfloat16", flops, int(3 * num_bytes), times=10),
    ]
    target = parse_target("1xH100")
    assert operations_s(costs, target, _IDEAL) == pytest.approx(2 + 10 * 3)
    # The compiler counts a quarter of the bytes: the second is bound by products now.
    assert operations_s(costs, target, _IDEAL, 1 / 4) == pytest.approx(2 + 10 * 1)
    assert operations_s([], target, _IDEAL) == 0


def test_starts_of_kernels_are_a_part_of_each_step() -> None:
    target = parse_target("8xH100")
    each_s = 2 * 7 / 8 * 45 / 450
    alone, together = predict_scaling(target, [_sum(45 * 10**9)], 3.0, _IDEAL, 4, launch_s=0.5)
    assert (alone.num_devices, together.num_devices) == (4, 8)
    assert together.launch_s == 0.5
    assert together.step_s == pytest.approx(3 + 0.5 + each_s)
    assert together.shortest_s == pytest.approx(3.5)
    assert together.efficiency == pytest.approx(3.5 / (3.5 + each_s))
    single = predict_step(target.of_size(1), [], 3.0, _IDEAL, launch_s=0.5)
    assert (single.step_s, single.efficiency) == (3.5, 1)


@pytest.mark.parametrize(
    ("bytes_per_s", "round_trip_s", "measured_s"),
    [(125e6, 0.0, 0.120), (12.5e6, 0.0, 1.2), (125e6, 0.052, 0.275)],
)
def test_sums_over_slow_links_take_the_measured_time(bytes_per_s, round_trip_s, measured_s) -> None:
    """13 MB of Gloo between two hosts; docs/design/local_updates.md has the measurement."""
    assumed = Assumptions(network_bytes_per_s=bytes_per_s, network_latency_s=round_trip_s)
    two_hosts = Target(ACCELERATORS["H100"], num_groups=2, devices_per_group=1)
    assert message_s(_sum(12_970_000), two_hosts, assumed) == pytest.approx(measured_s, rel=0.25)


# FLOPs and bytes of single operations, against arithmetic and against the count of a jaxpr.

_CONVOLUTION = 2 * 8 * 14 * 14 * 32 * 3 * 3 * 16  # 3x3 from 16 features to 32, on 14x14


def _program(line: str, *before: str, computations: str = "") -> Schedule:
    body = "\n".join(f"  {one}" for one in (*before, line))
    return Schedule(f"{computations}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n")


def _costs(*lines: str) -> list[OperationCost]:
    return _program(*lines).operations()


def test_dot_of_hlo() -> None:
    found = _costs(
        "%dot.1 = f32[5,4,6]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, "
        "lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
        "%a = bf16[5,4,7]{2,1,0} parameter(0)",
        "%b = bf16[5,7,6]{2,1,0} parameter(1)",
    )
    num_bytes = 2 * 5 * 4 * 7 + 2 * 5 * 7 * 6 + 4 * 5 * 4 * 6
    assert found == [OperationCost("bfloat16", 2 * 5 * 4 * 6 * 7, num_bytes)]


def test_product_of_cublas_with_its_workspace() -> None:
    (found,) = _costs(
        "%gemm.1 = (f32[4,6]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="
        '"__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
        "%a = f32[4,7]{1,0} parameter(0)",
        "%b = f32[7,6]{1,0} parameter(1)",
    )
    assert (found.dtype, found.flops) == ("float32", 2 * 4 * 6 * 7)


@pytest.mark.parametrize(
    ("target", "mask", "expected"),
    [
        ("fmhaSoftmax", "NO_MASK", 2 * 2),
        ("fmhaSoftmax", "CAUSAL", 2),
        ("fmhaSoftmaxBackward", "CAUSAL", 5),
    ],
)
def test_attention_of_cudnn(target, mask, expected) -> None:
    (found,) = _costs(
        "%cudnn-fmha.1 = (bf16[2,128,4,64]{3,2,1,0}, f32[2,4,128]{2,1,0}, u8[0]{0}) "
        f'custom-call(%q, %k, %k), custom_call_target="__cudnn${target}", backend_config='
        '{"cudnn_fmha_backend_config":{"algorithm":{"algo_id":"0"},'
        f'"mask_type":"{mask}","intermediate_tensor_shape":{{"element_type":"BF16",'
        '"dimensions":["2","4","128","256"],"tuple_shapes":[]}}}',
        "%q = bf16[2,128,4,64]{3,2,1,0} parameter(0)",
        "%k = bf16[2,256,4,64]{3,2,1,0} parameter(1)",
    )
    assert (found.dtype, found.flops) == ("bfloat16", expected * 2 * 4 * 128 * 256 * 64)


@pytest.mark.parametrize(
    ("target", "result", "first", "second"),
    [
        ("Forward", "8,14,14,32", "8,28,28,16", "32,3,3,16"),
        ("BiasActivationForward", "8,14,14,32", "8,28,28,16", "32,3,3,16"),
        ("BackwardInput", "8,28,28,16", "8,14,14,32", "32,3,3,16"),
        ("BackwardFilter", "32,3,3,16", "8,28,28,16", "8,14,14,32"),
    ],
)
def test_convolution_of_cudnn_costs_the_same_in_each_direction(
    target, result, first, second
) -> None:
    """The stride leaves holes in the gradient of the input, which cuDNN does not multiply."""
    (found,) = _costs(
        f"%conv.1 = (bf16[{result}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), "
        "window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_o01i->b01f, "
        f'custom_call_target="__cudnn$conv{target}"',
        f"%a = bf16[{first}]{{3,2,1,0}} parameter(0)",
        f"%b = bf16[{second}]{{3,2,1,0}} parameter(1)",
    )
    assert (found.dtype, found.flops) == ("bfloat16", _CONVOLUTION)


def test_product_in_a_fusion_belongs_to_it() -> None:
    inside = (
        "%fused (p: f32[4,7], q: f32[7,6]) -> f32[4,6] {\n"
        "  %p = f32[4,7]{1,0} parameter(0)\n"
        "  %q = f32[7,6]{1,0} parameter(1)\n"
        "  ROOT %dot.9 = f32[4,6]{1,0} dot(%p, %q), lhs_contracting_dims={1}\n"
        "}\n"
    )
    fusion = "%fusion.1 = f32[4,6]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused"
    parameters = ("%a = f32[4,7]{1,0} parameter(0)", "%b = f32[7,6]{1,0} parameter(1)")
    found = _program(fusion, *parameters, computations=inside).operations()
    assert found == [OperationCost("float32", 2 * 4 * 6 * 7, 4 * (28 + 42 + 24))]


def test_operations_and_messages_of_a_loop_count_as_often_as_it_runs() -> None:
    body = (
        "%body (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        "  %negate.1 = f32[8]{0} negate(%p)\n"
        "  ROOT %all-reduce.1 = f32[8]{0} all-reduce(%negate.1), to_apply=%add\n"
        "}\n"
    )
    loop = (
        '%while.1 = f32[8]{0} while(%x), body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    )
    schedule = _program(loop, "%x = f32[8]{0} parameter(0)", computations=body)
    assert OperationCost("float32", 0, 64, times=12) in schedule.operations()
    assert schedule.accessed_bytes() == 12 * (64 + 64)
    (found,) = schedule.reductions()
    assert (found.times, found.num_bytes) == (12, 32)
    nothing = _program("%t = (f32[8]{0}) tuple(%x)", "%x = f32[8]{0} parameter(0)")
    assert (nothing.operations(), nothing.reductions(), share_behind([])) == ([], [], 0)
    assert not nothing.is_scheduled


@pytest.mark.parametrize(
    "line",
    [
        '%c = f32[8]{0} custom-call(%x, %x), custom_call_target="__cublas$gemm"',
        "%c = f32[8]{0} dot(), lhs_contracting_dims={0}",
    ],
)
def test_product_of_unknown_shape_counts_nothing(line) -> None:
    (found,) = _costs(line, "%x = f32[8]{0} parameter(0)")
    assert found.flops == 0


def test_compiled_program_has_the_products_of_its_jaxpr() -> None:
    def loss(w, v, x):
        return jnp.sum(jnp.tanh(x @ w) @ v)

    arrays = (jnp.ones((64, 48)), jnp.ones((48, 8)), jnp.ones((16, 64)))
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    found = Schedule(step.lower(*arrays).compile().as_text()).operations()
    (expected,) = product_flops(jax.make_jaxpr(step)(*arrays)).values()
    assert sum(one.times * one.flops for one in found) == expected


# Figures of accelerators: within reason, and as the data sheets state them.


@pytest.mark.parametrize("name", ACCELERATORS)
def test_figures_of_an_accelerator_fit_together(name) -> None:
    kind = ACCELERATORS[name]
    assert kind.name == name
    assert 16e9 <= kind.memory_bytes <= 200e9
    assert 0.5 * kind.memory_bytes < kind.pool_bytes < kind.memory_bytes
    # A device reads its memory faster than others', and those of its host faster than far ones.
    assert kind.memory_bytes_per_s > kind.link_bytes_per_s > kind.network_bytes_per_s
    # Products need tens to hundreds of operations for each byte that is read.
    assert 50 < kind.peak_flops_per_s("bfloat16") / kind.memory_bytes_per_s < 1000
    assert kind.peak_flops_per_s("float32") <= kind.peak_flops_per_s("bfloat16")
    assert kind.peak_flops_per_s("int4") == kind.peak_flops_per_s("float32")
    assert bool(kind.gpu_info) == (kind.platform == "gpu")
