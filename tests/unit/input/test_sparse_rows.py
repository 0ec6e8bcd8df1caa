"""Batches with sparse arrays are split by rows, like dense ones."""

from __future__ import annotations

import collections
from typing import Any

import jax
import keras
import numpy as np
import pytest
import scipy.sparse
from jax.experimental import sparse

import stratagem as sg
from tests.parity.comparison import with_known_weights

# Rows of 1, 0, 3, 2 and 1 entries.
_X = np.array(
    [[0, 2, 0, 0], [0, 0, 0, 0], [1, 3, 0, -1], [0, 0, 4, 5], [6, 0, 0, 0]], dtype="float32"
)
_Y = np.arange(10, dtype="float32").reshape(5, 2)
_WEIGHTS = np.arange(8, dtype="float32").reshape(4, 2)

_KINDS = {
    "csr": scipy.sparse.csr_matrix,
    "array": scipy.sparse.coo_array,
    "BCOO": sparse.BCOO.fromdense,
}


def _mirrored() -> Any:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


def _model(*, run_eagerly: bool = False, is_sparse: bool = False) -> Any:
    inputs = keras.Input((4,), sparse=is_sparse)
    model = with_known_weights(keras.Model(inputs, keras.layers.Dense(2)(inputs)))
    model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse", run_eagerly=run_eagerly)
    return model


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Plain Keras with dense arrays."""
    model = _model()
    return _trained(model, _X)


def _trained(model: Any, x: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {"batch_size": 3, "verbose": 0}
    result = {
        "predict": model.predict(x, **arguments),
        "evaluate": model.evaluate(x, _Y, **arguments),
        "fit": model.fit(x, _Y, shuffle=False, **arguments).history["loss"],
    }
    return result | {"kernel": np.asarray(model.weights[0].value)}


@pytest.mark.slow
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("kind", _KINDS)
def test_model_sees_the_rows_of_sparse_features(kind, is_sparse, expected) -> None:
    with _mirrored().scope():
        model = _model(is_sparse=is_sparse)
    measured = _trained(model, _KINDS[kind](_X))
    for name, value in expected.items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_eager_replicas_see_the_rows_of_sparse_features(expected) -> None:
    with _mirrored().scope():
        model = _model(run_eagerly=True)
    measured = _trained(model, _KINDS["csr"](_X))
    for name, value in expected.items():
        np.testing.assert_allclose(measured[name], value, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_replica_function_gets_a_bcoo_array_of_its_rows(num_replicas) -> None:
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    rows = scipy.sparse.csr_matrix(_X)
    dataset = strategy.distribute_dataset([(rows[:3], _Y[:3]), (rows[3:], _Y[3:])])

    def step(x: Any, y: Any) -> Any:
        assert isinstance(x, sparse.BCOO)
        assert x.shape[0] == y.shape[0]
        return x @ _WEIGHTS

    results = [strategy.gather(strategy.run(step, args=batch), axis=0) for batch in dataset]
    np.testing.assert_allclose(np.concatenate(results), _X @ _WEIGHTS)


def test_parts_that_replicas_read_themselves_may_have_other_numbers_of_entries() -> None:
    strategy = _mirrored()
    parts = iter([scipy.sparse.csr_matrix(_X[:1]), scipy.sparse.csr_matrix(_X[2:4])])
    dataset = strategy.distribute_datasets_from_function(lambda context: list(parts))
    (batch, *_) = dataset
    results = strategy.run(lambda x: x @ _WEIGHTS, args=(batch,))
    np.testing.assert_allclose(strategy.gather(results, axis=0), _X[[0, 2, 3]] @ _WEIGHTS)


@pytest.mark.slow
def test_rows_of_tensorflow_and_of_compressed_arrays_are_those_of_coordinates() -> None:
    kind = collections.namedtuple("SparseTensorValue", "indices values dense_shape")  # of tf.data
    where = np.argwhere(_X)
    tensor = kind(where, _X[tuple(where.T)], np.array(_X.shape))
    strategy = _mirrored()
    for batch in strategy.distribute_dataset([tensor, sparse.BCSR.fromdense(_X)]):
        results = strategy.run(lambda x: x.todense(), args=(batch,))
        np.testing.assert_array_equal(strategy.gather(results, axis=0), _X)


def test_sparse_gradients_are_applied() -> None:
    strategy = _mirrored()
    with strategy.scope():
        variable = sg.Variable(np.zeros((3, 2), "float32"))
        optimizer = keras.optimizers.SGD(1.0)

    def step() -> None:
        gradient = sparse.BCOO.fromdense(jax.numpy.ones((3, 2)).at[1].set(0), nse=4)
        optimizer.apply([gradient], [variable])

    strategy.run(step)
    np.testing.assert_allclose(variable.value, [[-2, -2], [0, 0], [-2, -2]])
