"""Consumers that join a job: a run of their own, the current one, or a resumed one."""

from __future__ import annotations

from typing import Any

import numpy as np

from stratagem.input.service.consumer import ConsumerPosition
from stratagem.input.service.job_starts import JobStarts, Members
from stratagem.input.service.service_state import ServiceState
from stratagem.input.service.splits import ShardingPolicy, SourceFacts

_FACTS = SourceFacts(4, None, 1, can_seek=True, is_repeatable=False, has_shard_hint=False)


class _Starts:
    """A dispatcher's jobs, without the rest of it."""

    def __init__(self, num_workers: int = 0) -> None:
        self.state = ServiceState(None)
        self.state.add_dataset("d", _FACTS, np.zeros(1, np.uint8))
        members = Members(None)
        for number in range(num_workers):
            members.hear_worker(str(number), f"tcp://h:{number}", [], 0.0)
        self.starts = JobStarts(self.state, members, silence_s=3.0)

    def join(self, consumer: str, now_s: float = 0.0, **changed: Any) -> Any:
        fields = {
            "consumer": consumer,
            "job": "j",
            "is_named": True,
            "epoch": 0,
            "dataset_id": "d",
            "policy": int(ShardingPolicy.DYNAMIC),
            "num_consumers": None,
            "is_exact": False,
            "is_shared": False,
            "skip_errors": 0,
            "state": None,
            **changed,
        }
        return self.starts.join(fields, now_s)


def _position(num_consumers: int, *batches: tuple[int, int]) -> dict[str, Any]:
    position = ConsumerPosition()
    for split, index in batches:
        position.add(split, index)
    return position.state(num_consumers=num_consumers, num_lanes=None)


def test_consumers_of_one_name_and_epoch_share_a_run() -> None:
    starts = _Starts()
    first = starts.join("a").fields["run"]
    assert starts.join("b").fields["run"] == first
    assert starts.join("a").fields["run"] == first  # the same request again
    assert starts.join("c", epoch=1).fields["run"] != first
    assert starts.join("d", job="other").fields["run"] != first
    assert starts.state.runs[first].job.consumers == {"a", "b"}


def test_refusals_name_their_kind() -> None:
    starts = _Starts()
    starts.join("a")
    refused = starts.join("b", policy=int(ShardingPolicy.OFF))
    assert refused.fields["kind"] == "ValueError"
    assert "asked for the job 'j' with {'policy': 0}" in refused.fields["text"]
    assert starts.join("b", dataset_id="e", job="k").fields["kind"] == "NotFoundError"
    refused = starts.join("b", job="k", is_exact=True)
    assert "may have other batches when it is read again" in refused.fields["text"]


def test_a_resumed_job_begins_once_all_its_consumers_are_there() -> None:
    starts = _Starts()
    former = starts.join("a").fields["run"]
    assert starts.join("b", state=_position(2, (0, 0))) is None
    assert starts.join("b", 1.0, state=_position(2, (0, 0))) is None
    joined = starts.join("c", 2.0, state=_position(2, (1, 0))).fields["run"]
    assert starts.join("b", 2.0, state=_position(2, (0, 0))).fields["run"] == joined
    assert starts.state.ended == {former: "restored"}
    assert starts.state.runs[joined].spec.received == {"0": [[0, 1]], "1": [[0, 1]]}
    # Another resumption, by consumers of other names, is a run of its own.
    again = starts.join("d", 3.0, state=_position(1)).fields["run"]
    assert starts.state.ended[joined] == "restored"
    assert again in starts.state.runs


def test_a_consumer_that_does_not_come_is_an_error_for_the_others() -> None:
    starts = _Starts()
    assert starts.join("a", state=_position(2)) is None
    refused = starts.join("a", 6.0, state=_position(2))
    assert refused.fields["kind"] == "UnavailableError"
    assert "1 of 2 consumers of the job resumed it within 6 s" in refused.fields["text"]


def test_coordinated_reads_take_turns_with_the_workers_that_there_are() -> None:
    starts = _Starts(num_workers=3)
    off = int(ShardingPolicy.OFF)
    joined = starts.join("a", num_consumers=2, policy=off).fields
    assert (joined["num_lanes"], joined["num_splits"]) == (3, 3)
    assert starts.join("b", job="k", policy=off).fields["num_splits"] is None
