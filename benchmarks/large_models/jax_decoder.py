"""The same decoder and Adam by hand in JAX: sharded over all devices, gathered block by block.

The blocks are one scan over stacked weights. A gathered weight is not saved for the backward pass,
which gathers it again; gradients are summed in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.large_models.cases import Decoder
from benchmarks.large_models.keras_decoder import rotations

__all__ = ["local_loss", "lower_jax_step", "weight_shapes"]

_AXIS = "data"
_GATHERED = "gathered"
_BETA_1, _BETA_2, _EPSILON, _RATE = 0.9, 0.999, 1e-7, 1e-4
Weights = dict[str, Any]


def weight_shapes(sizes: Decoder) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Returns the shapes of a block's weights and of the others."""
    queries, keys = (count * sizes.head_size for count in (sizes.num_heads, sizes.num_kv_heads))
    width, inner = sizes.width, sizes.inner_width
    block = {
        "query": (width, queries),
        "key": (width, keys),
        "value": (width, keys),
        "output": (queries, width),
        "gate": (width, inner),
        "inner": (width, inner),
        "outer": (inner, width),
        "norm_0": (width,),
        "norm_1": (width,),
    }
    ends = {
        "embedding": (sizes.vocabulary, width),
        "norm": (width,),
        "logits": (width, sizes.vocabulary),
    }
    return block, ends


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(shard: jax.Array, dtype: str) -> jax.Array:
    whole = jax.lax.all_gather(shard.astype(dtype), _AXIS, tiled=True)
    return checkpoint_name(whole, _GATHERED)


def _gather_forward(shard: jax.Array, dtype: str) -> tuple[jax.Array, None]:
    return _gather(shard, dtype), None


def _gather_backward(dtype: str, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    wide = gradient.astype(jnp.float32)
    return (jax.lax.psum_scatter(wide, _AXIS, scatter_dimension=0, tiled=True),)


_gather.defvjp(_gather_forward, _gather_backward)


def _normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype) * scale


def _rotated(x: jax.Array) -> jax.Array:
    cosines, sines = (jnp.asarray(one, x.dtype) for one in rotations(x.shape[1], x.shape[-1]))
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosines - second * sines, second * cosines + first * sines], axis=-1
    )


def _block(x: jax.Array, shards: Mapping[str, Any], sizes: Decoder, dtype: str) -> jax.Array:
    whole = {name: _gather(shard, dtype) for name, shard in shards.items()}
    batch, length, _ = x.shape
    normalized = _normalized(x, whole["norm_0"])
    query, key, value = (
        jnp.reshape(normalized @ whole[name], (batch, length, -1, sizes.head_size))
        for name in ("query", "key", "value")
    )
    attended = jax.nn.dot_product_attention(_rotated(query), _rotated(key), value, is_causal=True)
    x = x + jnp.reshape(attended, (batch, length, -1)) @ whole["output"]
    normalized = _normalized(x, whole["norm_1"])
    gated = jax.nn.silu(normalized @ whole["gate"]) * (normalized @ whole["inner"])
    return x + gated @ whole["outer"]


def local_loss(
    weights: Weights, tokens: jax.Array, labels: jax.Array, case: tuple[Decoder, str, bool, int]
) -> jax.Array:
    sizes, dtype, recomputes, num_devices = case
    keep_all_but = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
    policy = jax.checkpoint_policies.nothing_saveable if recomputes else keep_all_but

    def body(x: jax.Array, shards: Weights) -> tuple[jax.Array, None]:
        return _block(x, shards, sizes, dtype), None

    x = jnp.take(_gather(weights["embedding"], dtype), tokens, axis=0)
    x, _ = jax.lax.scan(jax.checkpoint(body, policy=policy), x, weights["blocks"])

    @functools.partial(jax.checkpoint, policy=keep_all_but)
    def logits(x: jax.Array) -> jax.Array:
        normalized = _normalized(x, _gather(weights["norm"], dtype))
        return (normalized @ _gather(weights["logits"], dtype)).astype(jnp.float32)

    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits(x)), labels[..., None], axis=-1)
    return -jnp.mean(chosen) / num_devices


def _updated(weights: Any, slots: Any, gradients: Any) -> tuple[Any, Any]:
    def update(weight: Any, mean: Any, square: Any, gradient: Any) -> tuple[Any, Any, Any]:
        mean = mean + (gradient - mean) * (1 - _BETA_1)
        square = square + (gradient * gradient - square) * (1 - _BETA_2)
        return weight - _RATE * mean / (jnp.sqrt(square) + _EPSILON), mean, square

    found = jax.tree.map(update, weights, *slots, gradients)
    turned = jax.tree.transpose(jax.tree.structure(weights), jax.tree.structure((0, 0, 0)), found)
    return turned[0], turned[1:]


def lower_jax_step(
    sizes: Decoder, devices: Sequence[Any], *, dtype: str, recomputes: bool, length: int
) -> Any:
    """Lowers a training step with one sequence a device."""
    mesh = Mesh(list(devices), (_AXIS,))
    block, ends = weight_shapes(sizes)
    stacked = PartitionSpec(None, _AXIS)

    def shape(dims: Sequence[int], spec: PartitionSpec, kind: str = "float32") -> Any:
        return jax.ShapeDtypeStruct(dims, kind, sharding=NamedSharding(mesh, spec))

    weights: Weights = {name: shape(dims, PartitionSpec(_AXIS)) for name, dims in ends.items()}
    weights["blocks"] = {
        name: shape((sizes.num_layers, *dims), stacked) for name, dims in block.items()
    }
    specs = jax.tree.map(lambda one: one.sharding.spec, weights)
    tokens = shape((len(devices), length), PartitionSpec(_AXIS), "int32")

    def step(weights: Weights, slots: Any, tokens: Any, labels: Any) -> tuple[Any, Any, Any]:
        case = (sizes, dtype, recomputes, len(devices))
        loss, gradients = jax.value_and_grad(local_loss)(weights, tokens, labels, case)
        return *_updated(weights, slots, gradients), jax.lax.psum(loss, _AXIS)

    data = PartitionSpec(_AXIS)
    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(specs, (specs, specs), data, data),
        out_specs=(specs, (specs, specs), PartitionSpec()),
        check_vma=False,
    )
    jitted = jax.jit(run, donate_argnums=(0, 1))
    return jitted.lower(weights, (weights, weights), tokens, tokens)
