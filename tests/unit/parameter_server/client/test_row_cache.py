"""Options of the cache of rows, and training with it."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.parameter_server.clusters import coordinated

SHAPE = (9000, 8)  # smaller tables are read whole
IDS = np.random.default_rng(0).integers(20, size=(6, 8))


class Model:
    """Two tables, of which one is trained, with a loss of both."""

    def __init__(self) -> None:
        values = np.random.default_rng(1).normal(size=SHAPE).astype("float32")
        self.layers = [keras.layers.Embedding(*SHAPE) for _ in range(2)]
        for layer in self.layers:
            layer.build((None,))
            layer.embeddings.assign(values)
        self.tables = [layer.embeddings for layer in self.layers]
        self.optimizer = keras.optimizers.Adagrad(0.1)
        self.optimizer.build(self.tables[:1])

    def step(self, ids: Any) -> Any:
        def loss() -> Any:
            trained, frozen = (sg.nn.embedding_lookup(table, ids) for table in self.tables)
            return jnp.sum(jnp.square(trained - 0.5 * frozen))

        value, grads = sg.value_and_grad(loss, self.tables[:1])
        self.optimizer.apply_gradients([(grads[0], self.tables[0])])
        return value


def train(row_cache: sg.coordinator.RowCache | None) -> tuple[list[float], dict[str, int]]:
    """Returns the losses of steps on a worker, and the counts of its cache."""
    with coordinated(row_cache=row_cache) as coordinator:
        with coordinator.strategy.scope():
            model = Model()

        def step(ids: Any) -> Any:
            return sg.get_strategy().run(model.step, args=(jnp.asarray(ids),))

        losses = [float(coordinator.schedule(step, args=(ids,)).fetch()) for ids in IDS]
        return losses, coordinator.row_cache_counts()


@pytest.mark.slow
def test_rows_that_others_do_not_train_make_no_difference() -> None:
    wanted, counts = train(None)
    assert counts == {"hits": 0, "misses": 0}
    num_reads = 2 * sum(len({*ids.tolist()}) for ids in IDS)
    num_frozen = num_reads // 2 - len({*IDS.reshape(-1).tolist()})
    for max_age, num_hits in ((0, 0), (1, None), (len(IDS), num_frozen)):
        losses, counts = train(sg.coordinator.RowCache(max_rows=100, max_age_steps=max_age))
        np.testing.assert_allclose(losses, wanted, rtol=1e-6)
        if max_age:
            assert counts["hits"] + counts["misses"] == num_reads
        assert num_hits in (None, counts["hits"])


def test_own_updates_may_come_late() -> None:
    wanted, _ = train(None)
    options = sg.coordinator.RowCache(max_rows=100, max_age_steps=len(IDS), reads_own_updates=False)
    losses, counts = train(options)
    assert losses[0] == pytest.approx(wanted[0], rel=1e-6)
    assert losses[-1] > wanted[-1]  # of rows that were not trained yet
    num_reads = 2 * sum(len({*ids.tolist()}) for ids in IDS)
    assert counts["misses"] == 2 * len({*IDS.reshape(-1).tolist()})
    assert counts["hits"] == num_reads - counts["misses"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0, "max_age_steps": 1}, "max_rows=0"),
        ({"max_rows": True, "max_age_steps": 1}, "max_rows=True"),
        ({"max_rows": 1.5, "max_age_steps": 1}, "max_rows=1.5"),
        ({"max_rows": 1, "max_age_steps": -1}, "max_age_steps=-1"),
        ({"max_rows": 1, "max_age_steps": None}, "max_age_steps=None"),
        ({"max_rows": 1, "max_age_steps": 1, "reads_own_updates": 0}, "reads_own_updates=0"),
    ],
)
def test_invalid_options_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        sg.coordinator.RowCache(**options)


def test_strategy_refuses_what_it_cannot_use() -> None:
    cache = sg.coordinator.RowCache(max_rows=1, max_age_steps=1)
    with pytest.raises(ValueError, match="synchronous=True received row_cache=RowCache"):
        sg.ParameterServerStrategy(synchronous=True, row_cache=cache)
    with pytest.raises(TypeError, match="row_cache=100 is of type int"):
        sg.ParameterServerStrategy(row_cache=100)  # pyright: ignore[reportArgumentType]
