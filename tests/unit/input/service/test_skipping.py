"""Poison examples: skipped only if asked, each of them named, and nothing else is missed."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.service.consumer import ServiceClient
from stratagem.input.service.job import ServiceJob
from tests.unit.input.service.servers import input_servers

_POISON = {0, 7, 131, 199}
_SILENCE_MS = 60_000  # No part is lost by silence.


class _Texts:
    """Batches of which some cannot be read."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, number: int) -> np.ndarray:
        if number in _POISON:
            raise ValueError(f"Text {number} is empty.")
        return np.array(number)


def _dataset() -> sg.input.Dataset:
    return sg.input.Dataset(_Texts(), batch_size=1)


@pytest.fixture(scope="module")
def servers():
    with input_servers(2, worker_timeout_ms=_SILENCE_MS) as servers:
        yield servers


def _numbers(batches: sg.input.Dataset) -> list[int]:
    return sorted(batch.item() for batch in batches)


def test_all_other_batches_come_and_each_skipped_one_is_named(servers) -> None:
    distributed = servers.distribute(_dataset(), exactly_once=True, skip_errors=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert _numbers(distributed) == sorted(set(range(200)) - _POISON)
    told = sorted(str(one.message).splitlines()[0] for one in caught)
    line = _Texts.__getitem__.__code__.co_firstlineno + 2
    assert len(told) == 4
    for number in _POISON:
        (text,) = (one for one in told if one.endswith(f"ValueError: Text {number} is empty."))
        assert text.startswith(
            f"An input worker skipped batch {number % 3} of split {number // 3} in epoch 0: "
        )
        assert f"__getitem__ ({__file__}, line {line}) raised" in text


def test_one_more_than_asked_for_is_an_error(servers) -> None:
    distributed = servers.distribute(_dataset(), exactly_once=True, skip_errors=3)
    with (
        pytest.warns(RuntimeWarning, match="An input worker skipped"),
        pytest.raises(sg.errors.PoisonExampleError, match="or pass skip_errors"),
    ):
        _numbers(distributed)


def test_the_rest_of_a_file_is_skipped_with_a_batch_that_cannot_be_read(servers) -> None:
    def read(files: list[str]) -> sg.input.Dataset:
        def batches() -> Iterator[np.ndarray]:
            for file in files:
                yield np.array([10 * int(file)])
                if file == "2":
                    raise ValueError("The file is truncated.")
                yield np.array([10 * int(file) + 1])

        return sg.input.Dataset.from_generator(batches)

    dataset = sg.input.Dataset.from_files(["1", "2", "3"], read)
    with pytest.warns(RuntimeWarning, match=r"skipped batch 1 of the file 2 .*file is truncated"):
        found = _numbers(servers.distribute(dataset, exactly_once=True, skip_errors=1))
    assert found == [10, 11, 20, 30, 31]


def test_a_batch_is_skipped_once_by_all_workers_that_meet_it() -> None:
    timeout = {"worker_timeout_ms": _SILENCE_MS}
    with input_servers(1, **timeout) as servers, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # The one worker holds the split of batch 7 when it is lost.
        batches = iter(
            servers.distribute(
                _dataset(),
                exactly_once=True,
                skip_errors=4,
                max_outstanding_requests=1,
            )
        )
        found = [next(batches).item() for _ in range(7)]
        killed = servers.kill_worker()
        with ServiceClient(servers.target) as client:
            client.ask("lose_worker", address=killed.address)
        servers.workers.append(servers.add_worker())
        found += [batch.item() for batch in batches]
        assert sorted(found) == sorted(set(range(200)) - _POISON)
    assert len([one for one in caught if "skipped" in str(one.message)]) == 4


def test_a_restored_job_counts_anew(servers) -> None:
    distributed = servers.distribute(_dataset(), exactly_once=True, skip_errors=4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader = distributed.as_source().open(0)
        found = [next(reader).item() for _ in range(120)]
        state = json.loads(json.dumps(reader.state()))
        reader.close()
        again = distributed.as_source().open(0)
        again.restore(state)
        found += [batch.item() for batch in again]
    assert sorted(found) == sorted(set(range(200)) - _POISON)
    assert len(caught) >= 4


@pytest.mark.parametrize(
    "options",
    [
        {"skip_errors": -1},
        {"skip_errors": 1, "job_name": "j", "consumer_index": 0, "num_consumers": 2},
    ],
)
def test_the_number_is_checked(options) -> None:
    with pytest.raises(ValueError, match=r"skip_errors=-?1 was passed with num_consumers"):
        sg.input.service.distribute("distributed_epoch", "127.0.0.1:1", **options)


def test_decisions_are_records() -> None:
    job = ServiceJob(3, skip_errors=1)
    first, other = ({"split": 0, "index": index, "text": "bad"} for index in (4, 5))
    (record,), is_skipped = job.fail(first)
    assert is_skipped
    job.apply(record)
    assert job.skipped == [first]
    assert job.fail(first) == ([], True)
    assert job.fail(other) == ([{"what": "fail", "error": other}], False)
    assert ServiceJob(3, skip_errors=1).fail({"kind": "open"})[1] is False
