"""Datasets of TensorFlow, PyTorch and Hugging Face: `make test-external NAME=peers`."""

from __future__ import annotations

import importlib
import importlib.util
import json
from typing import Any

import jax
import numpy as np
import pytest

import stratagem as sg
from stratagem.input.sources.adapters import as_source, batched_source
from stratagem.input.sources.source import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY

# Loaded once, before any test: TensorFlow sets environment variables.
_LIBRARIES = {
    name: importlib.import_module(name) if importlib.util.find_spec(name) else None
    for name in ("tensorflow", "torch", "torchdata", "datasets")
}


def _library(name: str, called: str) -> Any:
    if _LIBRARIES[name] is None:
        pytest.skip(f"{called} is not installed: `make test-external NAME=peers` has it")
    return _LIBRARIES[name]


def _rows(batches: Any) -> list[Any]:
    return [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), batch) for batch in batches]


def _check_going_on(make: Any) -> None:
    """Compares a restored reader with an uninterrupted one."""
    undisturbed = make().open(0)
    state_of_all = undisturbed.state()
    expected = _rows(undisturbed)
    for num_read in (1, len(expected) - 1):
        again = make().open(0)
        again.restore(json.loads(json.dumps(state_of_all)))
        assert _rows(next(again) for _ in range(num_read)) == expected[:num_read]
        state = json.loads(json.dumps(again.state()))
        restored = make().open(0)
        restored.restore(state)
        assert _rows(restored) == expected[num_read:]


class TestTensorFlow:
    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        self.tf = _library("tensorflow", "TensorFlow")

    def test_batches_are_numpy(self) -> None:
        data = {"x": np.arange(5), "y": np.arange(5, dtype="uint8")}
        source = as_source(self.tf.data.Dataset.from_tensor_slices(data).batch(2))
        batches = list(source.open(0))
        assert [batch["x"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
        assert all(isinstance(batch["y"], np.ndarray) for batch in batches)
        assert batches[0]["y"].dtype == np.uint8
        assert source.cardinality == 3
        assert source.element_spec()["y"] == sg.input.ArraySpec((None,), "uint8")

    def test_cardinality_may_be_infinite_or_unknown(self) -> None:
        dataset = self.tf.data.Dataset.range(4).batch(2)
        assert as_source(dataset.repeat()).cardinality == INFINITE_CARDINALITY
        assert as_source(dataset.filter(lambda _: True)).cardinality == UNKNOWN_CARDINALITY

    def test_own_policy_of_a_dataset_is_followed(self) -> None:
        dataset = self.tf.data.Dataset.range(8).batch(4)
        policies = self.tf.data.experimental.AutoShardPolicy
        for policy in sg.AutoShardPolicy:
            options = self.tf.data.Options()
            options.experimental_distribute.auto_shard_policy = getattr(policies, policy.name)
            assert as_source(dataset.with_options(options)).auto_shard_policy is policy

    @pytest.mark.parametrize("seed", [None, 3], ids=["no seed", "seed"])
    def test_shuffled_dataset_goes_on(self, seed: int | None) -> None:
        _check_going_on(
            lambda: as_source(self.tf.data.Dataset.range(40).shuffle(20, seed=seed).batch(4))
        )


class TestTorch:
    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        self.torch = _library("torch", "PyTorch")

    def _loader(self, **options: Any) -> Any:
        torch = self.torch
        dataset = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10.0))
        return torch.utils.data.DataLoader(dataset, batch_size=3, **options)

    def test_batches_are_numpy(self) -> None:
        source = as_source(self._loader())
        assert source.cardinality == 4
        first = next(source.open(0))
        assert [type(leaf) for leaf in first] == [np.ndarray, np.ndarray]
        assert first[0].tolist() == [0, 1, 2]

    def test_loader_in_order_goes_on(self) -> None:
        _check_going_on(lambda: as_source(self._loader()))

    def test_shuffled_loader_with_a_generator_goes_on(self) -> None:
        def make() -> Any:
            generator = self.torch.Generator()
            generator.manual_seed(np.random.default_rng().integers(2**31).item())
            return as_source(self._loader(shuffle=True, generator=generator))

        _check_going_on(make)

    def test_shuffled_loader_without_a_generator_says_what_to_do(self) -> None:
        reader = as_source(self._loader(shuffle=True)).open(0)
        with pytest.raises(NotImplementedError, match="Fix: give it a generator"):
            reader.state()

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata's
    def test_stateful_loader_goes_on(self) -> None:
        _library("torchdata", "torchdata")
        loaders = importlib.import_module("torchdata.stateful_dataloader")

        def make() -> Any:
            return as_source(loaders.StatefulDataLoader(list(range(12)), batch_size=3))

        expected = _rows(make().open(0))
        reader = make().open(0)
        assert _rows(next(reader) for _ in range(2)) == expected[:2]
        again = make().open(0)
        again.restore(json.loads(json.dumps(reader.state())))
        assert _rows(again) == expected[2:]


class TestHuggingFace:
    @pytest.fixture(autouse=True)
    def _loaded(self) -> None:
        self.datasets = _library("datasets", "Hugging Face datasets")

    def test_rows_are_batched_and_shuffled(self) -> None:
        dataset = self.datasets.Dataset.from_dict({"x": list(range(7)), "y": [[0.5] * 2] * 7})
        source = batched_source(dataset, batch_size=3, shuffle=True, seed=0, drop_remainder=False)
        batches = list(source.open(0))
        assert sorted(n for batch in batches for n in batch["x"].tolist()) == list(range(7))
        assert [batch["y"].shape for batch in batches] == [(3, 2), (3, 2), (1, 2)]

    def test_dataset_of_batches_goes_on(self) -> None:
        _check_going_on(
            lambda: as_source(self.datasets.Dataset.from_dict({"x": list(range(7))}).batch(2))
        )

    def test_streamed_dataset_goes_on(self) -> None:
        dataset = self.datasets.Dataset.from_dict({"x": list(range(12))})

        def make() -> Any:
            return as_source(dataset.to_iterable_dataset().batch(2))

        expected = _rows(make().open(0))
        assert [batch["x"] for batch in expected[:2]] == [[0, 1], [2, 3]]
        reader = make().open(0)
        assert _rows(next(reader) for _ in range(2)) == expected[:2]
        again = make().open(0)
        again.restore(json.loads(json.dumps(reader.state())))
        assert _rows(again) == expected[2:]

    def test_streamed_dataset_is_shared_by_its_files(self) -> None:
        examples = self.datasets.Dataset.from_dict({"x": list(range(12))})
        source = as_source(examples.to_iterable_dataset(num_shards=4).batch(2))
        assert source.num_files == 4
        parts = [
            [row for batch in source.shard(2, i).open(0) for row in batch["x"]] for i in (0, 1)
        ]
        assert sorted(parts[0] + parts[1]) == list(range(12))
        assert len(parts[0]) == len(parts[1]) == 6

    def test_examples_may_be_every_nth(self) -> None:
        examples = self.datasets.Dataset.from_dict({"x": list(range(10))})
        dataset = sg.input.Dataset(examples, batch_size=4).shard(3, 1)
        assert [batch["x"].tolist() for batch in dataset] == [[1, 4, 7]]
