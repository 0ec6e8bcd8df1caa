"""Encoding and decoding of events, and rejected lines."""

from __future__ import annotations

import dataclasses
import json

import pytest

from stratagem.observe.run_events.records import Event, StartEvent, decode, encode
from tests.unit.observe.goodput.runs import (
    end,
    failure,
    first_step,
    gang_restart,
    members,
    memory,
    notice,
    progress,
    restart,
    restored,
    save,
    steps,
    straggler,
    warning,
)

ONE_OF_EACH: list[Event] = [
    gang_restart().processes[0].start,
    first_step(3, 1),
    *save(3, 4, 1, failed="disk full"),
    restored(5, 1),
    failure(6, "worker 1", silence_s=2.5),
    failure(6),
    restart(7, 1),
    notice(8),
    steps(3, 4, 2, 3, waited=0.5),
    dataclasses.replace(steps(3, 4, 2, 3, waited=0.5), input_s=0.1, peers_s=0.2, transfer_s=0.3),
    dataclasses.replace(steps(3, 4, 2, 3), received_s={"worker 1": 0.5, "worker 2": 1}),
    straggler(8, "worker 1", late_s=0.1, step_s=0.4),
    members(8, 0, 3, pause_s=None, step_s=None),
    members(8, 3, 2, lost="0 2", joined="1", pause_s=0.5),
    progress(8, 7, 10, loss=0.5, accuracy=None),
    memory(8, None),
    memory(8, 12, 34),
    warning(8, "first\nsecond \u00e9"),
    end(9, -9, "killed by SIGKILL\nand more: \u00e9"),
    end(9),
]


@pytest.mark.parametrize("event", ONE_OF_EACH)
def test_event_is_one_line_and_comes_back(event) -> None:
    line = encode(event)
    assert "\n" not in line
    assert decode(line) == event


def test_line_names_its_version_and_its_kind_and_carries_the_fields() -> None:
    assert json.loads(encode(restored(5, 17, "memory"))) == {
        "version": 1,
        "kind": "restored",
        "time_s": 5.0,
        "monotonic_s": 5,
        "step": 17,
        "source": "memory",
    }


def test_field_of_a_later_release_is_left_out() -> None:
    values = json.loads(encode(ONE_OF_EACH[0])) | {"color": "blue"}
    assert isinstance(decode(json.dumps(values)), StartEvent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "This line is not an event: its version is 2"),
        ({"version": None}, "This line is not an event: its version is None"),
        ({"kind": "coffee"}, "This line is not an event: its kind is 'coffee'"),
        ({"step": "7"}, "This line is not an event: its step is '7'"),
        ({"step": True}, "This line is not an event: its step is True"),
        ({"step": 7.5}, "This line is not an event: its step is 7.5"),
        ({"source": None}, "This line is not an event: its source is None"),
        ({"time_s": float("nan")}, "This line is not an event: its time_s is nan"),
    ],
)
def test_line_of_another_form_is_refused(change, message) -> None:
    line = json.dumps(json.loads(encode(restored(5, 17))) | change)
    with pytest.raises(ValueError, match=message):
        decode(line)


def test_steps_of_an_earlier_release_have_no_waits() -> None:
    values = json.loads(encode(first_step(3, 1)))
    for name in ("waited_s", "idle_s", "input_s", "peers_s", "transfer_s", "received_s"):
        del values[name]
    assert decode(json.dumps(values)) == first_step(3, 1)


@pytest.mark.parametrize("values", [None, [1.0], {"loss": "1"}, {"loss": True}, {"loss": {}}])
def test_values_of_another_form_are_refused(values) -> None:
    line = json.dumps(json.loads(encode(progress(8, 7))) | {"values": values})
    with pytest.raises(ValueError, match="its values is"):
        decode(line)


def test_infinite_value_is_refused() -> None:
    line = encode(progress(8, 7, loss=1.0)).replace('"loss": 1.0', '"loss": Infinity')
    with pytest.raises(ValueError, match=r"its values is \{'loss': inf\}"):
        decode(line)


@pytest.mark.parametrize("line", ["", '{"version": 1, "ki', "[1]", "7", "\x00\x00"])
def test_torn_line_is_refused(line) -> None:
    with pytest.raises(ValueError, match="it is not a complete JSON object"):
        decode(line)


@pytest.mark.parametrize("received_s", [0.5, [], {"worker 1": "0.5"}, {"worker 1": True}])
def test_times_of_receiving_of_another_form_are_refused(received_s) -> None:
    line = json.dumps(json.loads(encode(first_step(3, 1))) | {"received_s": received_s})
    with pytest.raises(ValueError, match="its received_s is"):
        decode(line)


@pytest.mark.parametrize("lost", ["worker 1", None, [1], [None], {"worker 1": 1.0}])
def test_members_of_another_form_are_refused(lost) -> None:
    line = json.dumps(json.loads(encode(members(8, 1, 2, lost="1"))) | {"lost": lost})
    with pytest.raises(ValueError, match="its lost is"):
        decode(line)
