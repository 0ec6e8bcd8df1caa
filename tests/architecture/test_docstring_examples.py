"""Every example in a docstring runs and gives what it says."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.architecture.source_tree import package

# What the examples take for granted.
_NAMES: dict[str, Any] = {"sg": sg, "np": np, "jax": jax, "keras": keras}
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# These train a model or start processes: seconds each. By the ends of their names.
_SLOW = (
    ".BackupAndRestore",
    ".BaselineClassifier",
    ".BaselineEstimator",
    ".BaselineRegressor",
    ".BinaryClassHead",
    ".ChunkedSparseCategoricalCrossentropy",
    ".ClusterCoordinator",
    ".DNNClassifier",
    ".DNNEstimator",
    ".DNNLinearCombinedClassifier",
    ".DNNLinearCombinedEstimator",
    ".DNNLinearCombinedRegressor",
    ".DNNRegressor",
    ".DatasetCreator",
    ".DynamicEmbedding",
    ".Estimator",
    ".ExportedModel",
    ".Exporter",
    ".LinearClassifier",
    ".LinearEstimator",
    ".LinearRegressor",
    ".LoadStatus",
    ".MemoryPlan",
    ".ParameterServerStrategy",
    ".Plan",
    ".PlanChoice",
    ".RandomState",
    ".RemoteCluster",
    ".RowUpdates.scatter_add",
    ".ShardedVariable",
    ".add_metrics",
    ".changed_rows",
    ".chunked_softmax_cross_entropy",
    ".load_exported",
    ".make_early_stopping_hook",
    ".model_to_estimator",
    ".planner.plan",
    ".remat",
    ".saving.publish",
    ".saving.restore",
    ".saving.rollback",
    ".saving.save",
    ".serving.Tables",
    ".spawn",
    ".starting.start",
    ".stop_if_higher_hook",
    ".stop_if_lower_hook",
    ".table_stats.stats",
    ".train_and_evaluate",
)


def _examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found: list[doctest.DocTest] = []
    for module in package():
        loaded = importlib.import_module(module.name)
        found += [test for test in finder.find(loaded, extraglobs=_NAMES) if test.examples]
    return found


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            example,
            id=example.name,
            marks=pytest.mark.slow if example.name.endswith(_SLOW) else (),
        )
        for example in _examples()
    ],
)
def test_example_gives_what_it_says(
    example: doctest.DocTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "cpu")
    report: list[str] = []
    doctest.DocTestRunner(optionflags=_OPTIONS).run(example, out=report.append)
    assert not report, "".join(report)
