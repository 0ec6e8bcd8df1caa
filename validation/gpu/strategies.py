"""Every strategy of one process trains on the GPU as one CPU device does.

Matrix products are exact to float32 here (`jax_default_matmul_precision=highest`); what TF32 makes
of them is in `numerics.py`. Weights of 8 steps agree within 2e-4, losses within 1e-4.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from validation.gpu.checks import check, device, is_on_cpu
from validation.gpu.models import difference, digits, reference, train

WEIGHTS_WITHIN = 2e-4
LOSSES_WITHIN = 1e-4


def _exact() -> None:
    import jax

    jax.config.update("jax_default_matmul_precision", "highest")


def compared(strategy: Any, *kinds: str) -> dict[str, Any]:
    """Trains under a strategy and on one CPU device; returns the differences, if small enough."""
    _exact()
    figures: dict[str, Any] = {"strategy": repr(strategy)}
    for kind in kinds or ("mlp", "conv"):
        model, other = train(strategy, kind), reference(kind)
        x, y = digits(kind)
        batch_losses = zip(model.losses_of_fit, other.losses_of_fit, strict=True)
        figures[kind] = {
            "weights": difference(model, other),
            "losses": max(abs(one - two) for one, two in batch_losses),
            "evaluate": abs(
                model.evaluate(x, y, batch_size=32, verbose=0)[0]
                - other.evaluate(x, y, batch_size=32, verbose=0)[0]
            ),
            "predict": float(
                np.abs(
                    model.predict(x, batch_size=32, verbose=0)
                    - other.predict(x, batch_size=32, verbose=0)
                ).max()
            ),
            "on": sorted({str(d) for v in model.variables for d in v.stored.devices()}),
        }
        found = figures[kind]
        assert found["weights"] <= WEIGHTS_WITHIN, figures
        assert max(found["losses"], found["evaluate"]) <= LOSSES_WITHIN, figures
        assert found["predict"] <= 10 * WEIGHTS_WITHIN, figures
    return figures


@check(priority=0)
def one_device() -> dict[str, Any]:
    import stratagem as sg

    return compared(sg.OneDeviceStrategy(device()))


@check(priority=0)
def mirrored() -> dict[str, Any]:
    import stratagem as sg

    return compared(sg.MirroredStrategy([device()]))


@check(priority=1)
def mirrored_default_is_the_gpu() -> dict[str, Any]:
    import jax

    import stratagem as sg

    strategy = sg.MirroredStrategy(["cpu:0"] if is_on_cpu() else None)
    assert strategy.topology.devices is not None
    assert strategy.topology.devices[0] == jax.devices()[0]
    figures = compared(strategy, "mlp")
    no_strategy = sg.get_strategy().run(lambda: jax.numpy.ones(()))
    figures["default_strategy_on"] = str(no_strategy.devices())
    return figures


@check(priority=1)
def central_default() -> dict[str, Any]:
    import stratagem as sg

    return compared(sg.CentralStorageStrategy([device()]))


@check(priority=1)
def central_on_cpu() -> dict[str, Any]:
    import stratagem as sg

    return compared(sg.CentralStorageStrategy([device()], "cpu:1"), "mlp", "conv", "table")


@check(priority=1)
def central_in_pinned_memory() -> dict[str, Any]:
    import stratagem as sg

    strategy = sg.CentralStorageStrategy([device()], "pinned_host")
    figures = compared(strategy, "mlp", "conv", "table")
    kinds = {str(v.stored.sharding.memory_kind) for v in strategy.variables.live()}
    figures["memory_kinds"] = sorted(kinds)
    assert "pinned_host" in kinds, figures
    return figures


@check(priority=1)
def hybrid_central_and_pinned() -> dict[str, Any]:
    import stratagem as sg

    places = {"embeddings": "central", "kernel_of_head": "pinned_host"}
    return compared(sg.HybridStrategy([device()], placement=places), "table")


@check(priority=1)
def hybrid_pinned_table() -> dict[str, Any]:
    import stratagem as sg

    return compared(sg.HybridStrategy([device()], placement={"embeddings": "pinned_host"}), "table")


@check(priority=2)
def sharded_state_of_one_replica() -> dict[str, Any]:
    import stratagem as sg

    figures = {}
    for state in ("optimizer", "all"):
        figures[state] = compared(sg.MirroredStrategy([device()], shard_state=state), "mlp")
    return figures


@check(priority=2)
def compression_options() -> dict[str, Any]:
    import stratagem as sg

    figures: dict[str, Any] = {}
    for compression in (None, "bfloat16"):
        options = sg.CommunicationOptions(compression=compression)
        strategy = sg.MultiWorkerMirroredStrategy(communication_options=options)
        figures[str(compression)] = compared(strategy, "mlp")
    if not is_on_cpu():
        strategy = sg.MirroredStrategy([device()], cross_device_ops=sg.NcclAllReduce())
        figures["NCCL"] = compared(strategy, "mlp")
    return figures


@check(priority=1)
def local_updates_of_one_replica() -> dict[str, Any]:
    import stratagem as sg

    figures = {}
    for method in (sg.local_updates.LocalSGD(period=1), sg.local_updates.DiLoCo(period=4)):
        strategy = sg.LocalUpdateStrategy(method, devices=[device()])
        losses = train(strategy, "mlp").losses_of_fit
        figures[type(method).__name__] = losses
        assert np.isfinite(losses).all(), figures
        assert losses[-1] < losses[0] + 0.1, figures
    return figures


@check(priority=0)
def custom_loops() -> dict[str, Any]:
    """`run`, `run_steps`, `sg.function` and the CPU device give the same weights."""
    _exact()
    weights, losses = {}, {}
    for way in ("cpu", "run", "run_steps", "function"):
        losses[way], weights[way] = _looped(way)
    figures: dict[str, Any] = {"losses": losses}
    for way in ("run", "run_steps", "function"):
        pairs = zip(weights[way], weights["cpu"], strict=True)
        figures[way] = max(float(np.abs(one - two).max()) for one, two in pairs)
        assert figures[way] <= WEIGHTS_WITHIN, figures
        assert np.allclose(losses[way], losses["cpu"], atol=LOSSES_WITHIN), figures
    return figures


def _looped(way: str) -> tuple[list[float], list[np.ndarray[Any, Any]]]:
    """Returns the losses of four steps and the weights after them."""
    import keras

    import stratagem as sg

    x, y = digits("mlp")
    strategy = sg.OneDeviceStrategy("cpu:0") if way == "cpu" else sg.MirroredStrategy([device()])
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((64,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(10)]
        )
        optimizer = keras.optimizers.SGD(0.05)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(batch: Any) -> Any:
        inputs, labels = batch

        def loss() -> Any:
            return sg.compute_average_loss(loss_of(labels, model(inputs)), global_batch_size=25)

        value, gradients = sg.value_and_grad(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    def once(batch: Any) -> Any:
        return strategy.run(step, args=(batch,))

    called = sg.function(once) if way == "function" else once
    parts = [(x[place : place + 25], y[place : place + 25]) for place in (0, 25, 50, 75)]
    batches = strategy.distribute_dataset(parts)
    if way == "run_steps":
        found = np.asarray(strategy.run_steps(step, iter(batches), 4, reduce="sum")).tolist()
    else:
        found = [float(strategy.reduce("sum", called(batch), axis=None)) for batch in batches]
    return found, [np.asarray(weight) for weight in model.get_weights()]


@check(priority=1)
def checkpoints() -> dict[str, Any]:
    """What the GPU saved is read on CPU bit by bit, and the other way round, with slots."""
    import stratagem as sg

    _exact()
    gpu = lambda: sg.MirroredStrategy([device()])  # noqa: E731 - a strategy for each model
    cpu = lambda: sg.OneDeviceStrategy("cpu:0")  # noqa: E731
    pinned = lambda: sg.CentralStorageStrategy([device()], "pinned_host")  # noqa: E731
    figures: dict[str, Any] = {}
    for name, (first, second) in {
        "gpu to cpu": (gpu, cpu),
        "cpu to gpu": (cpu, gpu),
        "gpu to pinned": (gpu, pinned),
        "pinned to gpu": (pinned, gpu),
    }.items():
        saved, restored = train(first(), "mlp"), train(second(), "mlp", epochs=1)
        with tempfile.TemporaryDirectory() as folder:
            path = sg.train.Checkpoint(model=saved, optimizer=saved.optimizer).save(
                str(Path(folder) / "ckpt")
            )
            sg.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(path)
        pairs = [*zip(saved.variables, restored.variables, strict=True)]
        pairs += zip(saved.optimizer.variables, restored.optimizer.variables, strict=True)
        unequal = [
            one.path for one, two in pairs if not np.array_equal(np.asarray(one), np.asarray(two))
        ]
        figures[name] = {"variables": len(pairs), "unequal": unequal}
        assert not unequal, figures
        x, y = digits("mlp")
        after = [
            model.fit(x, y, batch_size=32, shuffle=False, verbose=0) for model in (saved, restored)
        ]
        figures[name]["weights after one more epoch"] = difference(saved, restored)
        assert figures[name]["weights after one more epoch"] <= WEIGHTS_WITHIN, (figures, after)
    return figures


@check(priority=0, timeout_s=150)
def half_precision() -> dict[str, Any]:
    """bfloat16 and float16 with a loss scale train almost as float32 does."""
    import keras

    import stratagem as sg

    figures: dict[str, Any] = {}
    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        for kind in ("mlp", "conv"):
            model = train(sg.MirroredStrategy([device()]), kind, epochs=4, optimizer="adam")
            figures[f"{policy} {kind}"] = model.losses_of_fit
            print(policy, kind, model.losses_of_fit, flush=True)
            assert np.isfinite(model.losses_of_fit).all(), figures
            pairs = zip(model.losses_of_fit, figures[f"float32 {kind}"], strict=True)
            assert all(abs(one - two) < 0.05 for one, two in pairs), figures
    optimizer = model.optimizer
    assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer), type(optimizer)
    before, iterations = float(optimizer.dynamic_scale), int(optimizer.iterations)
    kernel = np.asarray(model.trainable_variables[0])
    x, y = digits("conv")
    model.fit(x * np.float32(np.inf), y, batch_size=100, verbose=0)  # gradients overflow
    figures["scale"] = [before, float(optimizer.dynamic_scale)]
    assert figures["scale"][1] == before / 2, figures
    assert np.array_equal(np.asarray(model.trainable_variables[0]), kernel)
    figures["iterations"] = [iterations, int(optimizer.iterations)]
    keras.config.set_dtype_policy("float32")
    return figures


@check(priority=2)
def multi_worker_of_one() -> dict[str, Any]:
    import os
    import socket

    import stratagem as sg

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {"worker": [address]}, "task": {"type": "worker", "index": 0}}
    )
    strategy = sg.MultiWorkerMirroredStrategy()
    figures = compared(strategy, "mlp", *([] if is_on_cpu() else ["conv"]))  # of two replicas there
    figures["resolver"] = repr(strategy.cluster_resolver)
    return figures
