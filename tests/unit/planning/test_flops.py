"""FLOPs of matrix products, compared with hand counts and with the compiler."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from stratagem.planning.traced_costs import product_flops


def _flops(function, *shapes) -> dict[str, float]:
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return product_flops(jax.make_jaxpr(function)(*arrays))


def test_dense_layer_and_its_gradients() -> None:
    def loss(x, w):
        return jnp.sum((x @ w) ** 2)

    forward = 2 * 16 * 32 * 8
    assert _flops(loss, (16, 32), (32, 8)) == {"float32": forward}
    assert _flops(jax.grad(loss, argnums=(0, 1)), (16, 32), (32, 8)) == {"float32": 3 * forward}


def test_products_are_counted_by_dtype() -> None:
    counted = product_flops(
        jax.make_jaxpr(lambda x: (x @ x, x.astype("bfloat16") @ x.astype("bfloat16")))(
            jnp.ones((4, 4))
        )
    )
    assert counted == {"float32": 128, "bfloat16": 128}


def test_loop_counts_as_often_as_it_runs() -> None:
    def looped(x):
        return jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=5)[0]

    assert _flops(looped, (4, 4)) == {"float32": 5 * 128}


def test_the_dearest_branch_counts() -> None:
    def branched(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)

    assert _flops(branched, (4, 4)) == {"float32": 2 * 128}


def test_batched_product() -> None:
    assert _flops(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), (3, 4, 5), (3, 5, 6)) == {
        "float32": 2 * 3 * 4 * 5 * 6
    }


def test_no_products() -> None:
    assert _flops(jnp.sum, (4,)) == {}


@pytest.mark.parametrize(
    ("strides", "padding"), [((1, 1), "VALID"), ((1, 1), "SAME"), ((2, 2), "SAME")]
)
def test_convolution_and_its_gradients_as_the_compiler_counts_them(strides, padding) -> None:
    """XLA's own count leaves padding and holes out, too; it adds the elementwise operations."""

    def loss(x, w):
        return jnp.sum(jax.lax.conv_general_dilated(x, w, strides, padding) ** 2)

    def both(x, w):
        return jax.grad(loss, argnums=(0, 1))(x, w)

    shapes = [jax.ShapeDtypeStruct(s, "float32") for s in ((2, 3, 12, 12), (8, 3, 3, 3))]
    for function in (loss, both):
        counted = product_flops(jax.make_jaxpr(function)(*shapes))["float32"]
        by_xla = jax.jit(function).lower(*shapes).cost_analysis()["flops"]
        assert counted == pytest.approx(by_xla, rel=0.05)


@pytest.mark.parametrize(("is_causal", "share"), [(False, 1), (True, 0.5)])
def test_attention_in_one_kernel_counts_as_its_products(is_causal, share, monkeypatch) -> None:
    module = "jax._src.cudnn.fused_attention_stablehlo"
    monkeypatch.setattr(f"{module}.check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(f"{module}.check_compute_capability", lambda capability: True)
    queries = jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16")

    def counted(implementation, transform):
        def loss(q, k, v):
            found = jax.nn.dot_product_attention(
                q, k, v, is_causal=is_causal, implementation=implementation
            )
            return found.astype("float32").sum()

        with jax.numpy_dtype_promotion("standard"):
            jaxpr = jax.make_jaxpr(transform(loss))(queries, queries, queries)
        return product_flops(jaxpr)

    forward = sum(counted("xla", lambda fn: fn).values())
    assert counted("cudnn", lambda fn: fn) == {"bfloat16": share * forward}
    # Backward there are two products for each of the forward pass, and one is computed anew.
    gradients = counted("cudnn", lambda fn: jax.grad(fn, (0, 1, 2)))
    assert gradients == {"bfloat16": share * 3.5 * forward}
