"""Estimates of candidates, on cases whose best choice follows from arithmetic."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import pytest

import stratagem as sg
from stratagem.devices.finding import placeholder, planning_for
from stratagem.planning.candidates import (
    Estimate,
    Form,
    PlanCandidate,
    Weight,
    Workload,
    estimate,
    list_candidates,
)
from stratagem.planning.choices import PlanChoice, PlanSearch
from stratagem.planning.schedule import OperationCost
from stratagem.planning.search import workload_of
from stratagem.planning.step_time import Assumptions
from stratagem.planning.targets import parse_target
from stratagem.planning.traced_costs import TracedCosts, product_flops, trace_costs

_COSTS = TracedCosts(
    operations=(OperationCost("bfloat16", 1e12, 0),),
    activation_bytes=2**20,
    with_gradients_bytes=2**21,
    divided_share=0.0,
    summed_bytes=2**20,
    host_bytes=0.0,
)


def _work(size: int, costs: TracedCosts = _COSTS, batch: int = 64) -> Workload:
    weight = Weight((size, 1024), 4096 * size, 8192 * size)
    costs = dataclasses.replace(costs, with_gradients_bytes=costs.activation_bytes + 4096 * size)
    block = [Weight((2**20,), 2**22)]
    return Workload([weight], {(Form(), 1): costs}, 1, batch, block, 16)


def _best(work: Workload, target: str) -> PlanCandidate:
    machine = parse_target(target)
    found = list_candidates(machine, work.global_batch, [Form()], strategy="MirroredStrategy")
    estimates = {one: estimate(one, work, machine) for one in found}
    return min(found, key=lambda one: (not estimates[one].fits, estimates[one].step_s))


def _candidate(shard_state: str | None, shard_size: int = 8) -> PlanCandidate:
    return PlanCandidate(
        strategy="MirroredStrategy",
        num_replicas=8,
        devices_per_replica=1,
        shard_size=shard_size,
        shard_state=shard_state,
        form=Form(),
    )


def test_memory_of_state_is_arithmetic() -> None:
    work, target = _work(2**20), parse_target("8xH100")  # 2^30 weights
    gib = 2**30
    replicated = estimate(_candidate(None, 1), work, target).memory_bytes
    # Gradients of products in bfloat16 take half of float32.
    assert replicated == pytest.approx(14 * gib, rel=0.01)
    whole = estimate(_candidate("all"), work, target).memory_bytes
    assert whole == pytest.approx(16 / 8 * gib, rel=0.01)
    halves = estimate(_candidate("all", 2), work, target).memory_bytes
    assert halves == pytest.approx(16 / 2 * gib, rel=0.01)


def test_frozen_weights_are_gathered_in_their_own_bytes() -> None:
    """As the int8 base of a model that is tuned with LoRA: no gradient of it is sent or stored."""
    size, target = 2**30, parse_target("8xH100")
    trained, gib = Weight((1024,), 4096), 2**30

    def found(base: Weight, *, is_sharded: bool = True) -> Estimate:
        work = dataclasses.replace(_work(2**10), weights=[trained, base], block=[base])
        candidate = _candidate("all") if is_sharded else _candidate(None, 1)
        return estimate(candidate, work, target)

    int8 = found(Weight((2**20, 1024), size, is_trained=False))
    bfloat16 = found(Weight((2**20, 1024), 2 * size, is_trained=False))
    float32 = found(Weight((2**20, 1024), 4 * size, is_trained=False))
    # A shard, and the gathered weights of two blocks.
    assert int8.memory_bytes == pytest.approx((1 / 8 + 2) * gib, rel=0.01)
    assert bfloat16.memory_bytes == pytest.approx((2 / 8 + 4) * gib, rel=0.01)
    assert float32.memory_bytes == pytest.approx((4 / 8 + 4) * gib, rel=0.01)
    (sent,) = {name for name in int8.seconds if name.startswith("collectives")}
    assert bfloat16.seconds[sent] == pytest.approx(2 * int8.seconds[sent], rel=0.1)
    assert float32.seconds[sent] == pytest.approx(bfloat16.seconds[sent], rel=0.05)
    replicated = found(Weight((2**20, 1024), size, is_trained=False), is_sharded=False)
    assert replicated.seconds[sent] < 0.1 * int8.seconds[sent]  # 16 small messages


def test_what_does_not_fit_replicated_is_sharded() -> None:
    work = _work(12 * 2**20)  # 48 GiB of weights: too large beside an eighth of 96 GiB of slots
    target = parse_target("8xH100")
    replicated = estimate(_candidate(None, 1), work, target)
    assert (replicated.fits, replicated.limit) == (False, "memory")
    assert _best(work, "8xH100").shard_state == "all"


def test_slow_links_between_hosts_keep_shards_inside() -> None:
    """In float32, three messages of the weights cross hosts, or the two halves of one sum."""
    costs = dataclasses.replace(_COSTS, operations=(OperationCost("float32", 1e12, 0),))
    work, machine = _work(2**22, costs), parse_target("32xH100")
    slow = Assumptions(network_bytes_per_s=1e9)
    step_s = {
        size: estimate(
            dataclasses.replace(_candidate("all", size), num_replicas=32), work, machine, slow
        ).step_s
        for size in (8, 32)
    }
    assert step_s[8] < 0.8 * step_s[32]


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (_COSTS, "compute"),
        (dataclasses.replace(_COSTS, host_bytes=1e12), "host link"),
        (
            dataclasses.replace(_COSTS, operations=(OperationCost("bfloat16", 1e6, 0),)),
            "collectives over NVLink",
        ),
    ],
)
def test_limit(costs, expected) -> None:
    work = _work(2**18, costs)
    assert estimate(_candidate("all"), work, parse_target("8xH100")).limit == expected


def test_replicas_of_several_devices_sum_partial_products() -> None:
    work = _work(0)
    work = dataclasses.replace(work, costs={(Form(), 2): _COSTS})
    candidate = dataclasses.replace(_candidate(None, 1), num_replicas=4, devices_per_replica=2)
    found = estimate(candidate, work, parse_target("8xH100"))
    sent_s = found.seconds["collectives over NVLink"]
    assert sent_s == pytest.approx(16 * 2**20 / (450e9 * 0.8) + 64 * 2 * 2e-6)
    assert found.step_s == pytest.approx(found.seconds["compute"] + sent_s)


# FLOPs of matrix products, compared with hand counts and with the compiler.


def _loss(x, w):
    return jnp.sum((x @ w) ** 2)


_FORWARD = 2 * 16 * 32 * 8


@pytest.mark.parametrize(
    ("function", "shapes", "expected"),
    [
        (_loss, [(16, 32), (32, 8)], {"float32": _FORWARD}),
        (jax.grad(_loss, argnums=(0, 1)), [(16, 32), (32, 8)], {"float32": 3 * _FORWARD}),
        (
            lambda x: (x @ x, x.astype("bfloat16") @ x.astype("bfloat16")),
            [(4, 4)],
            {"float32": 128, "bfloat16": 128},
        ),
        # A loop counts as often as it runs, and of branches the dearest.
        (
            lambda x: jax.lax.scan(lambda carry, _: (carry @ carry, None), x, length=5)[0],
            [(4, 4)],
            {"float32": 5 * 128},
        ),
        (
            lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x),
            [(4, 4)],
            {"float32": 2 * 128},
        ),
        (
            lambda a, b: jnp.einsum("bij,bjk->bik", a, b),
            [(3, 4, 5), (3, 5, 6)],
            {"float32": 2 * 3 * 4 * 5 * 6},
        ),
        (jnp.sum, [(4,)], {}),
    ],
    ids=["dense", "gradients", "dtypes", "loop", "branches", "batched", "none"],
)
def test_products_are_counted(function, shapes, expected) -> None:
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    assert product_flops(jax.make_jaxpr(function)(*arrays)) == expected


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


# Costs of traced steps of a few products, compared with arithmetic.

_ROWS, _WIDTH = 32, 64
_PRODUCT = 2 * _ROWS * _WIDTH * _WIDTH
_ARRAY = 4 * _ROWS * _WIDTH


def _weights(count: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((_WIDTH, _WIDTH), "float32")] * count


def _step(forward, weights, rows=_ROWS):
    def step(weights, x):
        gradients = jax.grad(lambda weights: jnp.sum(forward(weights, x)))(weights)
        return [one - 0.1 * gradient for one, gradient in zip(weights, gradients, strict=True)]

    x = jax.ShapeDtypeStruct((rows, _WIDTH), "float32")
    return jax.make_jaxpr(step)(weights, x), {i: i for i in range(len(weights))}


def _chain(weights, x):
    for one in weights:
        x = jnp.tanh(x @ one)
    return x


def _recomputed(weights, x):
    for one in weights:
        x = jax.checkpoint(lambda x, one: jnp.tanh(x @ one))(x, one)
    return x


def test_products_and_kept_arrays_of_a_chain() -> None:
    """Three products a layer, without that for the input of the first."""
    few, many = (trace_costs(*_step(_chain, _weights(count))) for count in (4, 12))
    assert few.flops == (3 * 4 - 1) * _PRODUCT
    grown = (many.activation_bytes - few.activation_bytes) / 8
    # The product, from which the gradient of tanh is computed, and the input of the next product.
    assert _ARRAY <= grown <= 3 * _ARRAY
    assert few.with_gradients_bytes > few.activation_bytes


def test_recomputation_takes_a_product_and_saves_arrays() -> None:
    kept = trace_costs(*_step(_chain, _weights(12)))
    recomputed = trace_costs(*_step(_recomputed, _weights(12)))
    assert recomputed.flops == pytest.approx(kept.flops + 12 * _PRODUCT, rel=0.03)
    assert recomputed.activation_bytes < kept.activation_bytes


def test_offloaded_arrays_are_on_the_host() -> None:
    policy = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")

    def offloaded(weights, x):
        for one in weights:
            layer = jax.checkpoint(lambda x, one: jnp.tanh(jnp.sin(x @ one)), policy=policy)
            x = layer(x, one)
        return x

    found = trace_costs(*_step(offloaded, _weights(6)))
    assert found.host_bytes == 6 * _ARRAY


def test_devices_of_a_replica_sum_products_over_a_divided_axis() -> None:
    jaxpr, trained = _step(_chain, _weights(2))
    by_columns_then_rows = {0: frozenset({1}), 1: frozenset({0})}
    found = trace_costs(jaxpr, trained, divisions=by_columns_then_rows)
    assert found.summed_bytes == _ARRAY  # the input's gradient is not needed
    assert 0 < found.divided_share < 1
    assert trace_costs(jaxpr, trained).summed_bytes == 0


# Choices with the figures of a plan in place of estimates.

_TARGET = parse_target("8xH100")
_LINKS = "collectives over NVLink"


def _choice() -> PlanChoice:
    candidate = PlanCandidate(
        strategy="MirroredStrategy",
        num_replicas=8,
        devices_per_replica=1,
        shard_size=8,
        shard_state="all",
        form=Form(),
    )
    seconds = {"compute": 1.0, _LINKS: 0.5, "host link": 0.0}
    return PlanChoice(candidate, Estimate(2**30, 1.0, 0.4, True, "compute", seconds), _TARGET)


def _plan(*, fits: bool = True, reduction_s: float = 0.1) -> Any:
    step = SimpleNamespace(step_s=2.0, compute_s=1.0, launch_s=0.0, reduction_s=reduction_s)
    return SimpleNamespace(memory=SimpleNamespace(total_bytes=2**31), step=step, fits=fits)


def test_figures_of_a_plan_replace_estimates() -> None:
    choice = dataclasses.replace(_choice(), plan=_plan())
    assert (choice.memory_bytes, choice.step_s, choice.limit) == (2**31, 2.0, "compute")
    assert choice.mfu == pytest.approx(0.2)
    fields = choice.to_dict()
    assert (fields["is_compiled"], fields["estimated_step_s"]) == (True, 1.0)
    assert dataclasses.replace(_choice(), plan=_plan(reduction_s=3.0)).limit == _LINKS
    one = dataclasses.replace(_choice(), plan=_plan(fits=False))
    assert one.limit == "memory"
    assert PlanSearch("model", _TARGET, 16, (one,), 40).headline == (
        "model on 8xH100, global batch 16: the best 1 of 40 settings. None of them fits."
    )


# Candidates: which there are, and that their code builds their strategy.


def _candidates(batch: int = 64, sizes=(1, 2)) -> list[PlanCandidate]:
    forms = [Form(), Form("full", "mixed_bfloat16")]
    return list_candidates(_TARGET, batch, forms, strategy="MirroredStrategy", model_sizes=sizes)


def test_all_meshes_fill_the_machine_once() -> None:
    found = _candidates()
    assert len(found) == len(set(found)) == 2 * (1 + 2 * 3 + 1 + 2 * 2)
    for one in found:
        copies, shards, size = one.mesh
        assert copies * shards * size == 8


def test_a_batch_smaller_than_the_machine_needs_replicas_of_several_devices() -> None:
    assert {one.devices_per_replica for one in _candidates(batch=4)} == {2}
    assert not _candidates(batch=3)


@pytest.mark.parametrize(
    "candidate", [one for one in _candidates() if one.form == Form()], ids=lambda one: one.code
)
def test_code_builds_the_strategy(candidate) -> None:
    namespace = {"sg": sg, "layout_map": {".*kernel": (None, "logical")}}
    lines = [one for one in candidate.code.split("; ") if one.startswith("strategy")]
    with planning_for(_TARGET.topology):
        exec(lines[0], namespace)
    topology = namespace["strategy"].topology
    assert topology.num_replicas == candidate.num_replicas
    assert topology.num_logical_devices == candidate.devices_per_replica
    setting, _, remat = _candidates()[-1].code.split("; ")  # before it, and after the model
    assert setting == 'keras.config.set_dtype_policy("mixed_bfloat16")'
    assert remat == 'sg.remat(model, "full")'
    if candidate.shard_state:
        assert topology.num_shards == candidate.shard_size
        assert namespace["strategy"].placement.shard_state == candidate.shard_state


# Workloads of small models, compared with arithmetic.


def test_a_model_with_adam() -> None:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, use_bias=False)])
    model.compile("adam", "mse")
    batch = placeholder((16, 8), "float32"), placeholder((16, 4), "float32")
    work = workload_of(model, batch, parse_target("2xH100"), [Form()])
    assert (work.num_examples, work.global_batch) == (8, 16)
    assert work.example_bytes == 4 * (8 + 4)
    assert [one.shape for one in work.weights if one.is_trained] == [(8, 4)]
    assert sum(one.slot_bytes for one in work.weights) == 2 * 4 * 32 + 8
    assert [one.shape for one in work.block] == [(8, 4)]
    # The product, and that for the gradient of the weight.
    assert work.costs[Form(), 1].flops == 2 * 2 * 8 * 8 * 4
