"""The same files through TensorFlow's data service and ours: `make test-external NAME=peers`."""

from __future__ import annotations

import collections
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service.splits import ShardingPolicy
from tests.unit.input.service.servers import bucketed, coordinated, in_threads, input_servers

# Loaded once, before any test: TensorFlow sets environment variables.
_TENSORFLOW = (
    importlib.import_module("tensorflow") if importlib.util.find_spec("tensorflow") else None
)
_NUM_WORKERS = 2


@pytest.fixture(scope="module")
def tf() -> Any:
    if _TENSORFLOW is None:
        pytest.skip("TensorFlow is not installed: `make test-external NAME=peers` has it")
    return _TENSORFLOW


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("files")
    paths = []
    for number in range(5):
        path = Path(folder, f"{number}.txt")
        path.write_text("".join(f"{number} {line}\n" for line in range(number + 2)))
        paths.append(str(path))
    return paths


@pytest.fixture(scope="module")
def tf_service(tf):
    service = tf.data.experimental.service
    dispatcher = service.DispatchServer(
        service.DispatcherConfig(worker_addresses=_NUM_WORKERS * ["localhost:%port%"])
    )
    address = dispatcher.target.split("://")[1]
    workers = [
        service.WorkerServer(
            service.WorkerConfig(
                address, worker_address="localhost:%port%", heartbeat_interval_ms=50
            )
        )
        for _ in range(_NUM_WORKERS)
    ]
    yield dispatcher.target
    del workers


@pytest.fixture(scope="module")
def servers():
    with input_servers(_NUM_WORKERS) as servers:
        yield servers


def _lines(files: list[str]) -> list[np.ndarray]:
    return [np.array([line]) for file in files for line in Path(file).read_text().splitlines()]


def _counts(batches: Any) -> collections.Counter[str]:
    values = [np.asarray(batch).reshape(-1)[0] for batch in batches]
    return collections.Counter(
        value.decode() if isinstance(value, bytes) else str(value) for value in values
    )


@pytest.mark.parametrize("policy", [policy for policy in ShardingPolicy if policy.name != "HINT"])
def test_each_policy_visits_the_lines_as_often(tf, files, tf_service, servers, policy) -> None:
    service = tf.data.experimental.service
    expected = tf.data.TextLineDataset(files).apply(
        service.distribute(getattr(service.ShardingPolicy, policy.name), tf_service)
    )
    found = servers.distribute(sg.input.Dataset.from_files(files, _lines), policy)
    assert _counts(found) == _counts(expected.as_numpy_iterator())


def test_a_hint_is_filled_in_by_both(tf, tf_service, servers) -> None:
    service = tf.data.experimental.service
    hint = tf.data.experimental.SHARD_HINT
    expected = tf.data.Dataset.range(9).shard(hint, hint).batch(1)
    expected = expected.apply(service.distribute(service.ShardingPolicy.HINT, tf_service))
    dataset = sg.input.Dataset(np.arange(9), batch_size=1)
    dataset = dataset.shard(sg.input.SHARD_HINT, sg.input.SHARD_HINT)
    found = servers.distribute(dataset, ShardingPolicy.HINT)
    assert _counts(found) == _counts(expected.as_numpy_iterator())


def test_consumers_share_the_elements_in_both(tf, files, tf_service, servers) -> None:
    service = tf.data.experimental.service
    expected = [
        tf.data.TextLineDataset(files).apply(
            service.distribute("distributed_epoch", tf_service, job_name="shared")
        )
        for _ in range(2)
    ]
    ours = sg.input.Dataset.from_files(files, _lines)
    found = [servers.distribute(ours, consumer_index=index, num_consumers=2) for index in range(2)]
    assert _shared(found) == _shared([one.as_numpy_iterator() for one in expected])


def _shared(datasets: list[Any]) -> collections.Counter[str]:
    counts: list[collections.Counter[str]] = [collections.Counter() for _ in datasets]

    def consume(number: int) -> None:
        counts[number] = _counts(datasets[number])

    in_threads(consume, len(datasets))
    return sum(counts, collections.Counter())


def test_coordinated_consumers_have_one_length_in_a_step_in_both(tf, tf_service, servers) -> None:
    service, num_steps = tf.data.experimental.service, 6
    lengths = tf.data.Dataset.range(1, 4).flat_map(
        lambda length: tf.data.Dataset.from_tensors(tf.fill([1, length], length)).repeat(2)
    )
    steps: list[list[int]] = [[], []]

    def consume(index: int) -> None:
        dataset = lengths.repeat().apply(
            service.distribute(
                "parallel_epochs", tf_service, "rounds", consumer_index=index, num_consumers=2
            )
        )
        steps[index] = [batch.shape[1] for batch in dataset.take(num_steps)]

    in_threads(consume)
    assert len(steps[0]) == num_steps
    assert steps[0] == steps[1]
    ours = coordinated(servers, bucketed(3, [2, 2, 2]), "rounds")
    assert all(first.shape[1] == second.shape[1] for first, second in ours)
