"""States of several consumers become the state of their job."""

from __future__ import annotations

from stratagem.input.service.consumer import ConsumerPosition
from stratagem.input.service.job_starts import JoinedStates


def _joined(*positions: ConsumerPosition, num_lanes: int | None = None) -> JoinedStates:
    joined = JoinedStates()
    for number, position in enumerate(positions):
        state = position.state(num_consumers=2, num_lanes=num_lanes)
        joined.add(f"consumer {number}", state)
    return joined


def test_all_consumers_are_waited_for() -> None:
    one = _joined(ConsumerPosition())
    assert (one.num_expected, one.is_complete, [*one.consumers]) == (2, False, ["consumer 0"])
    assert _joined(ConsumerPosition(), ConsumerPosition()).is_complete


def test_the_batches_of_all_consumers_are_received() -> None:
    first, second = ConsumerPosition(), ConsumerPosition()
    for split, index, position in [(0, 0, first), (0, 1, second), (1, 0, first), (2, 0, second)]:
        position.add(split, index)
    first.note_length(1, 1)
    joined = _joined(first, second)
    assert joined.done().as_json() == [[1, 2]]
    assert joined.received() == {"0": [[0, 2]], "2": [[0, 1]]}
    assert joined.num_lanes is None


def test_a_split_is_done_once_all_consumers_are_past_it() -> None:
    first, second = ConsumerPosition(), ConsumerPosition()
    for split in (0, 1):
        first.pass_split(split)
    second.pass_split(0)
    joined = _joined(first, second, num_lanes=3)
    assert joined.done().as_json() == [[0, 1]]
    assert joined.num_lanes == 3
