"""Variables that `keras.device` puts on a device: honoured or refused, never ignored."""

import jax
import numpy as np
import pytest

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras

from tests.unit.parameter_server.clusters import local_strategy

_DEVICES = ["cpu:1", "cpu:2"]


def _trained(strategy, device: str | None = None) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 3)).astype("float32"), np.ones((12, 1), "float32")
    with strategy.scope():
        keras.utils.set_random_seed(0)
        first, second = keras.layers.Dense(4), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((3,)), first])
        if device is None:
            model.add(second)
        else:
            with keras.device(device):
                model.add(second)
                model.build()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False)
    if device is not None:
        assert second.kernel.stored.devices() == {jax.devices()[3]}
        assert first.kernel.store is None
        momentum = [one for one in model.optimizer.variables if one.shape == (4, 1)]
        assert [one.stored.devices() for one in momentum] == [{jax.devices()[3]}]
    return model.get_weights()


def test_hybrid_strategy_keeps_it_there_and_has_the_numbers_of_one_device() -> None:
    hybrid = sg.HybridStrategy(_DEVICES, placement={})
    expected = _trained(sg.OneDeviceStrategy("cpu:0"))
    for own, one in zip(_trained(hybrid, "cpu:3"), expected, strict=True):
        np.testing.assert_allclose(own, one, rtol=1e-5, atol=1e-6)


def test_it_goes_before_rules_and_ends_with_its_block() -> None:
    strategy = sg.HybridStrategy(_DEVICES, placement={"table": "sharded"})
    with strategy.scope():
        with keras.device("cpu:3"):
            there = keras.Variable(np.ones((4, 2), "float32"), name="table")
            with keras.device("cpu:4"):
                inner = keras.Variable(np.ones(2, "float32"))
        parted = keras.Variable(np.ones((4, 2), "float32"), name="table")
    assert there.stored.devices() == {jax.devices()[3]}
    assert inner.stored.devices() == {jax.devices()[4]}
    assert len(parted.stored.devices()) == 2


@pytest.mark.parametrize(
    "make",
    [sg.MirroredStrategy, sg.CentralStorageStrategy],
    ids=["mirrored", "central"],
)
def test_other_strategies_refuse_it(make) -> None:
    with (
        make(_DEVICES).scope(),
        keras.device("cpu:3"),
        pytest.raises(ValueError, match="Expected no device for a single variable"),
    ):
        keras.Variable(np.ones(3, "float32"))


def test_parameter_servers_refuse_it() -> None:
    refused = pytest.raises(ValueError, match="Expected no device for a single variable")
    with local_strategy() as strategy, strategy.scope(), keras.device("cpu:3"), refused:
        keras.Variable(np.ones(3, "float32"))


def test_what_replicas_have_parts_of_is_refused_by_hybrid_strategy_too() -> None:
    strategy = sg.HybridStrategy(_DEVICES, placement={})
    with (
        strategy.scope(),
        keras.device("cpu:3"),
        pytest.raises(ValueError, match="Expected no device for"),
    ):
        sg.Variable(0.0, synchronization=sg.VariableSynchronization.ON_READ)


def test_the_only_device_of_a_strategy_may_be_named() -> None:
    with sg.OneDeviceStrategy("cpu:1").scope(), keras.device("cpu:1"):
        variable = keras.Variable(np.ones(3, "float32"))
    assert np.asarray(variable).sum() == 3
    central = sg.CentralStorageStrategy(_DEVICES, "cpu:3")
    with central.scope(), keras.device("cpu:3"):
        assert keras.Variable(np.ones(3, "float32")).stored.devices() == {jax.devices()[3]}
    with keras.device("cpu:2"):  # of no strategy
        assert keras.ops.ones(2).devices() == {jax.devices()[2]}
