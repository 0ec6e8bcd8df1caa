"""The journal of a dispatcher: the state after each record is the same when it is read again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stratagem.errors import UnavailableError
from stratagem.input.service.service_state import RunSpec, ServiceState
from stratagem.input.service.splits import ShardingPolicy, SourceFacts, SplitPlan

_FACTS = SourceFacts(4, None, 1, can_seek=True, is_repeatable=True, has_shard_hint=False)
_SPEC = RunSpec(
    run="r",
    job="j",
    is_named=True,
    epoch=0,
    dataset_id="d",
    policy=int(ShardingPolicy.DYNAMIC),
    num_consumers=None,
    num_lanes=1,
    is_exact=True,
    is_repeatable=True,
    skip_errors=0,
    plan=SplitPlan("ranges", 4, 1),
    done=[[0, 1]],
    received={"1": [[0, 1]]},
)
_RECORDS = [
    {"what": "join", "consumer": "c"},
    {"what": "assign", "split": 1, "worker": "w"},
    {"what": "assign", "split": 2, "worker": "w"},
    {"what": "lose", "split": 1},
    {"what": "report", "split": 1, "consumer": "c", "ranges": [[1, 2]]},
    {"what": "done", "split": 2},
    {"what": "leave", "consumer": "c"},
]


def _described(state: ServiceState) -> object:
    runs = {
        name: (run.spec, run.job.done, run.job.consumers, run.job.attempts, run.job.holders)
        for name, run in state.runs.items()
    }
    datasets = {name: (one.facts, one.pickled.tolist()) for name, one in state.datasets.items()}
    return runs, datasets


@pytest.mark.parametrize("num_records", range(len(_RECORDS) + 1))
def test_a_dispatcher_that_is_killed_after_any_record_has_the_same_state(
    tmp_path, num_records
) -> None:
    with ServiceState(str(tmp_path)) as state:
        assert state.add_dataset("d", _FACTS, np.arange(3, dtype=np.uint8)) == "d"
        state.begin(_SPEC)
        state.begin(dataclasses.replace(_SPEC, run="over"))
        state.end("over", "left")
        state.change("r", _RECORDS[:num_records])
        expected = _described(state)
    for _ in range(2):  # the second reads what the first wrote anew
        with ServiceState(str(tmp_path)) as state:
            assert _described(state) == expected


def test_without_a_folder_nothing_is_kept(tmp_path) -> None:
    with ServiceState(None) as state:
        state.begin(_SPEC)
        assert list(state.runs) == ["r"]
    with ServiceState(None) as state:
        assert state.runs == {}


def test_datasets_are_named_by_their_contents() -> None:
    with ServiceState(None) as state:
        ids = [state.add_dataset(None, _FACTS, np.full(3, n, np.uint8)) for n in (1, 1, 2)]
        assert ids[0] == ids[1] != ids[2]
        other = dataclasses.replace(_FACTS, cardinality=9)
        with pytest.raises(ValueError, match="one dataset for an id"):
            state.add_dataset(ids[0], other, np.full(3, 1, np.uint8))


def test_a_folder_has_one_dispatcher(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.2")
    with ServiceState(str(tmp_path)), pytest.raises(UnavailableError, match="process"):
        ServiceState(str(tmp_path))
