"""Models of clicks, trained in both ways on a cluster of threads."""

from __future__ import annotations

import itertools

import keras
import numpy as np
import pytest

import stratagem as sg
from examples.clicks import loops, models
from examples.clicks.law import NUM_FIELDS, NUM_NUMBERS, ClickLaw, area_under_curve
from tests.unit.parameter_server.clusters import local_strategy

LAW = ClickLaw(num_ids=10_000)
NUM_STEPS, BATCH_SIZE = 60, 256


@pytest.mark.slow
@pytest.mark.parametrize("loop", loops.LOOPS)
@pytest.mark.parametrize("name", models.MODELS)
def test_workers_learn(name, loop) -> None:
    partitioner = sg.partitioners.FixedShardsPartitioner(3)
    with local_strategy(2, num_servers=3, variable_partitioner=partitioner) as strategy:
        with strategy.scope():
            model = models.build(name, LAW.num_ids, NUM_FIELDS, NUM_NUMBERS, width=8)
            loops.compile_model(model, models.LEARNING_RATES[name])
        untrained = loops.evaluate(model, LAW, 2000, batch_size=500)
        train = loops.train_by_fit if loop == "fit" else loops.train_by_coordinator
        train(model, LAW, num_steps=NUM_STEPS, batch_size=BATCH_SIZE)
        coordinator = sg.coordinator.ClusterCoordinator(strategy)
        assert sum(coordinator.staleness().values()) == 3 * NUM_STEPS
        assert int(model.optimizer.iterations) == NUM_STEPS
        auc = loops.evaluate(model, LAW, 2000, batch_size=500)
        features, labels = LAW.examples(2**40, 2000)
        logits = model.predict(features, batch_size=500, verbose=0)
        assert auc == pytest.approx(area_under_curve(labels, logits), abs=0.002)
        assert auc > max(0.65, untrained + 0.1)


def test_sum_over_pairs_is_that_of_all_pairs() -> None:
    vectors = np.random.default_rng(0).normal(size=(4, 5, 3)).astype("float32")
    wanted = [
        sum(float(one @ other) for one, other in itertools.combinations(example, 2))
        for example in vectors
    ]
    np.testing.assert_allclose(models.sum_over_pairs(vectors), wanted, rtol=1e-5)


@pytest.mark.parametrize("name", models.MODELS)
def test_model_has_one_table(name) -> None:
    model = models.build(name, 50, NUM_FIELDS, NUM_NUMBERS, width=4)
    tables = [one for one in model.layers if isinstance(one, keras.layers.Embedding)]
    assert [tuple(one.embeddings.shape) for one in tables] == [(50, 4)]
    features, _ = ClickLaw(num_ids=50).examples(0, 7)
    assert model(features).shape == (7,)
