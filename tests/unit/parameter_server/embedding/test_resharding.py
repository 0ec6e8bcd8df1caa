"""`sg.embedding.reshard` under strategies, in callbacks, beside workers, and its errors."""

from __future__ import annotations

import threading
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.client.shard_layout import layout_of_keys
from stratagem.parameter_server.server.updates import UpdateMode
from tests.unit.parameter_server.clusters import local_strategy
from tests.unit.parameter_server.embedding.keyed_models import (
    FIT,
    IDS,
    KEYS,
    PLACES,
    Y,
    keyed_model,
    plain_model,
    rows_of,
)


class Reshard(keras.callbacks.Callback):
    """Moves the tables to another number of servers after each batch."""

    def __init__(self, strategy: Any, numbers: list[int]) -> None:
        super().__init__()
        self._strategy, self._numbers = strategy, numbers

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._numbers:
            sg.embedding.reshard(self._numbers.pop(0), strategy=self._strategy)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [UpdateMode(), UpdateMode(num_needed=1)])
def test_fit_with_moves_between_batches_is_plain_fit(mode) -> None:
    with local_strategy(num_servers=3, mode=mode) as strategy:
        keyed = keyed_model(strategy, lambda: keras.optimizers.Adam(0.05))
        plain = plain_model(keyed, keras.optimizers.Adam(0.05))
        numbers = [1, 3, 2, 3]
        callback = Reshard(strategy, numbers)
        keyed.fit(sg.embedding.keys(IDS), Y, **FIT, callbacks=[callback])
        assert not numbers
        plain.fit(PLACES, Y, **FIT)
        np.testing.assert_allclose(rows_of(keyed), rows_of(plain), rtol=1e-4, atol=1e-5)
        assert [one.rows for one in sg.embedding.stats(strategy).values()] == [len(KEYS)]
        assert int(keyed.optimizer.iterations) == 6


@pytest.mark.slow
def test_two_workers_that_push_while_tables_move() -> None:
    """Each function adds 1 to the rows of its keys: SGD with a gradient of -1."""
    num_functions = 120
    with local_strategy(num_workers=2, num_servers=3) as strategy:
        coordinator = sg.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            layer = sg.embedding.DynamicEmbedding(1, initializer="zeros", name="table")
            layer.build()
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([layer.embeddings])

        def push(keys: np.ndarray) -> None:
            def step(pairs: Any) -> Any:
                loss, grads = sg.value_and_grad(lambda: -layer(pairs).sum(), [layer.embeddings])
                optimizer.apply_gradients(zip(grads, [layer.embeddings], strict=True))
                return loss

            sg.get_strategy().run(step, args=(keys,))

        wanted = np.zeros(40, int)
        moves: list[sg.embedding.ReshardStats] = []
        random = np.random.default_rng(0)

        def move() -> None:
            for num_servers in (1, 3, 2, 3):
                moves.append(sg.embedding.reshard(num_servers, strategy=strategy))

        thread = threading.Thread(target=move)
        for number in range(num_functions):
            chosen = random.choice(40, 10, replace=False)
            wanted[chosen] += 1
            coordinator.schedule(push, args=(sg.embedding.keys(chosen * 2**40 + 1),))
            if number == 10:
                thread.start()
        thread.join()
        coordinator.join()
        assert len(moves) == 4
        rows = np.asarray(layer(sg.embedding.keys(np.arange(40) * 2**40 + 1)))
        np.testing.assert_array_equal(rows[:, 0], wanted)
        (stats,) = sg.embedding.stats(strategy).values()
        assert stats.rows == np.count_nonzero(wanted)


@pytest.mark.slow
def test_moves_beside_steps_of_one_process() -> None:
    with sg.HybridStrategy(placement={"table": "server"}, num_servers=2) as strategy:
        keyed = keyed_model(strategy, lambda: keras.optimizers.Adagrad(0.5))
        plain = plain_model(keyed, keras.optimizers.Adagrad(0.5))
        is_over = threading.Event()
        moves: list[Any] = []

        def move() -> None:
            while not is_over.is_set() or len(moves) < 2:
                moves.append(sg.embedding.reshard(1 + len(moves) % 2, strategy=strategy))

        thread = threading.Thread(target=move)
        thread.start()
        keyed.fit(sg.embedding.keys(IDS), Y, **FIT)
        is_over.set()
        thread.join()
        plain.fit(PLACES, Y, **FIT)
        np.testing.assert_allclose(rows_of(keyed), rows_of(plain), rtol=1e-4, atol=1e-5)


def test_bad_input() -> None:
    with local_strategy(num_servers=2) as strategy:
        with pytest.raises(ValueError, match="has no keyed tables"):
            sg.embedding.reshard(1, strategy=strategy)
        with strategy.scope():
            sg.embedding.DynamicEmbedding(1, max_rows=2, name="users").build()
        with pytest.raises(TypeError, match=r"received num_servers=1\.5"):
            sg.embedding.reshard(1.5, strategy=strategy)
        for number in (0, 3):
            with pytest.raises(ValueError, match="1 to 2, the servers of this cluster"):
                sg.embedding.reshard(number, strategy=strategy)
        for tables in ("users", ["items"]):
            with pytest.raises(ValueError, match="received tables="):
                sg.embedding.reshard(1, tables, strategy=strategy)
        assert sg.embedding.reshard(2, strategy=strategy) == sg.embedding.ReshardStats()
        strategy.placement.remote.variables.is_coordinator = False
        with pytest.raises(ValueError, match="one of several programs that update"):
            sg.embedding.reshard(1, strategy=strategy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 1}, "divides max_rows=1 over 2 servers"),
        (
            {"tiers": {"memory_bytes": 10**6, "folder": "/f"}},
            "has rows on disk and was to be moved",
        ),
    ],
)
def test_tables_that_cannot_be_moved(options, message) -> None:
    with local_strategy(num_servers=2) as strategy:
        client = strategy.placement.remote.variables.client
        client.know(layout_of_keys("users", (2,), "float32", [0], options))
        with pytest.raises(ValueError, match=message):
            sg.embedding.reshard(2, strategy=strategy)
