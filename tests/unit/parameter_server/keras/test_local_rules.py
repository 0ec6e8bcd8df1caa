"""Optimizers that workers cannot run by themselves."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import stratagem as sg
from tests.unit.parameter_server.local_models import FIT, IDS, X, Y, dense, table, training_apart

METHOD = sg.local_updates.LocalSGD(period=2)


@pytest.mark.parametrize(
    ("make", "data", "synchronous", "told"),
    [
        (lambda: dense(keras.optimizers.SGD(0.1, use_ema=True)), X, False, "has use_ema=True"),
        (
            lambda: table(keras.optimizers.SGD(0.1)),
            IDS,
            True,
            r"The tables \['model/table/embeddings'\] are trained by rows under synchronous=True",
        ),
    ],
    ids=["averages", "tables"],
)
def test_optimizer_that_needs_all_weights_is_refused(
    make: Any, data: Any, synchronous: bool, told: str
) -> None:
    with training_apart(METHOD, 2, synchronous=synchronous) as strategy:
        with strategy.scope():
            model = make()
        with pytest.raises(NotImplementedError, match=told):
            model.fit(data, Y, **FIT)


def test_workers_clip_their_own_gradients() -> None:
    alone = dense(keras.optimizers.SGD(0.1, clipnorm=0.01))
    alone.fit(X, Y, **FIT)
    with training_apart(METHOD, 1, synchronous=True) as strategy:
        with strategy.scope():
            model = dense(keras.optimizers.SGD(0.1, clipnorm=0.01))
        history = model.fit(X, Y, **FIT).history
        assert history["loss"][-1] == pytest.approx(alone.history.history["loss"][-1], rel=1e-4)
