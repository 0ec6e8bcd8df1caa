"""FLOPs and bytes of single operations, against arithmetic and against the count of a jaxpr."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from stratagem.planning.schedule import OperationCost, Schedule, operation_costs
from stratagem.planning.traced_costs import product_flops

_CONVOLUTION = 2 * 8 * 14 * 14 * 32 * 3 * 3 * 16  # 3x3 from 16 features to 32, on 14x14


def _program(line: str, *before: str, computations: str = "") -> Schedule:
    body = "\n".join(f"  {one}" for one in (*before, line))
    return Schedule(f"{computations}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n")


def test_dot_of_hlo() -> None:
    found = operation_costs(
        _program(
            "%dot.1 = f32[5,4,6]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, "
            "lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}",
            "%a = bf16[5,4,7]{2,1,0} parameter(0)",
            "%b = bf16[5,7,6]{2,1,0} parameter(1)",
        )
    )
    num_bytes = 2 * 5 * 4 * 7 + 2 * 5 * 7 * 6 + 4 * 5 * 4 * 6
    assert found == [OperationCost("bfloat16", 2 * 5 * 4 * 6 * 7, num_bytes)]


def test_product_of_cublas_with_its_workspace() -> None:
    (found,) = operation_costs(
        _program(
            "%gemm.1 = (f32[4,6]{1,0}, s8[4194304]{0}) custom-call(%a, %b), custom_call_target="
            '"__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
            '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
            "%a = f32[4,7]{1,0} parameter(0)",
            "%b = f32[7,6]{1,0} parameter(1)",
        )
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
    (found,) = operation_costs(
        _program(
            "%cudnn-fmha.1 = (bf16[2,128,4,64]{3,2,1,0}, f32[2,4,128]{2,1,0}, u8[0]{0}) "
            f'custom-call(%q, %k, %k), custom_call_target="__cudnn${target}", backend_config='
            '{"cudnn_fmha_backend_config":{"algorithm":{"algo_id":"0"},'
            f'"mask_type":"{mask}","intermediate_tensor_shape":{{"element_type":"BF16",'
            '"dimensions":["2","4","128","256"],"tuple_shapes":[]}}}',
            "%q = bf16[2,128,4,64]{3,2,1,0} parameter(0)",
            "%k = bf16[2,256,4,64]{3,2,1,0} parameter(1)",
        )
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
    (found,) = operation_costs(
        _program(
            f"%conv.1 = (bf16[{result}]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%a, %b), "
            "window={size=3x3 stride=2x2 pad=0_1x0_1}, dim_labels=b01f_o01i->b01f, "
            f'custom_call_target="__cudnn$conv{target}"',
            f"%a = bf16[{first}]{{3,2,1,0}} parameter(0)",
            f"%b = bf16[{second}]{{3,2,1,0}} parameter(1)",
        )
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
    found = operation_costs(_program(fusion, *parameters, computations=inside))
    assert found == [OperationCost("float32", 2 * 4 * 6 * 7, 4 * (28 + 42 + 24))]


def test_operations_of_a_loop_run_as_often_as_it_does() -> None:
    body = (
        "%body (p: f32[8]) -> f32[8] {\n"
        "  %p = f32[8]{0} parameter(0)\n"
        "  ROOT %negate.1 = f32[8]{0} negate(%p)\n"
        "}\n"
    )
    loop = (
        '%while.1 = f32[8]{0} while(%x), body=%body, backend_config={"known_trip_count":{"n":"12"}}'
    )
    schedule = _program(loop, "%x = f32[8]{0} parameter(0)", computations=body)
    assert operation_costs(schedule) == [OperationCost("float32", 0, 64, times=12)]
    assert schedule.accessed_bytes() == 12 * 64


def test_what_moves_no_data_costs_nothing() -> None:
    schedule = _program("%t = (f32[8]{0}) tuple(%x)", "%x = f32[8]{0} parameter(0)")
    assert operation_costs(schedule) == []


@pytest.mark.parametrize(
    "line",
    [
        '%c = f32[8]{0} custom-call(%x, %x), custom_call_target="__cublas$gemm"',
        "%c = f32[8]{0} dot(), lhs_contracting_dims={0}",
    ],
)
def test_product_of_unknown_shape_counts_nothing(line) -> None:
    (found,) = operation_costs(_program(line, "%x = f32[8]{0} parameter(0)"))
    assert found.flops == 0


def test_compiled_program_has_the_products_of_its_jaxpr() -> None:
    def loss(w, v, x):
        return jnp.sum(jnp.tanh(x @ w) @ v)

    arrays = (jnp.ones((64, 48)), jnp.ones((48, 8)), jnp.ones((16, 64)))
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    found = operation_costs(Schedule(step.lower(*arrays).compile().as_text()))
    (expected,) = product_flops(jax.make_jaxpr(step)(*arrays)).values()
    assert sum(one.times * one.flops for one in found) == expected
