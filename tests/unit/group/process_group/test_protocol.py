"""Invalid messages to the port of a group do it no harm."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import UnavailableError
from stratagem.group.authentication.secret import Credentials
from stratagem.group.hub import Hub
from stratagem.group.member import Group
from stratagem.group.protocol import frame, read_answer, read_message
from stratagem.group.verdict import GroupLimits
from tests.fuzzing import JSON, fuzz
from tests.unit.group.process_group.members import (
    as_bytes,
    connected,
    free_port,
    hello,
    identity,
    joined,
    together,
)

_LIMITS = GroupLimits(join_s=120, peer_s=120, stuck_s=600, barrier_s=120)
_BEAT = {"kind": "beat", "position": "python", "name": "", "step": 1, "moves": 1, "calls": 1}
_EXCHANGE = {
    "kind": "exchange",
    "stream": "main",
    "number": 0,
    "name": "position",
    "value": 1,
    "limit_s": 20.0,
    "setting": "S",
}
_ANNOUNCE = {"kind": "announce", "topic": "leaving", "numbers": [1, 20, 0]}
_NO_MESSAGES: list[Any] = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\x00\x00\x02[]",
    b"\x00\x00\x00\x04\xff\xfe\xff\xfe",
    b"\x00\x01\x00\x00" + b"[" * 2**16,
    {},
    {"kind": 3},
    {"kind": ["hello"]},
    {"kind": "dance"},
]


@pytest.mark.parametrize("message", [_BEAT, _EXCHANGE, _ANNOUNCE, hello(1, 2), {"kind": "gone"}])
def test_messages_are_read_as_they_were_written(message) -> None:
    assert _read(message) == message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"kind": "dance"}, "received an unknown message: {'kind': 'dance'}"),
        ({**_BEAT, "step": True}, "received an unknown message"),
        ({**_BEAT, "position": "nowhere"}, "received a message of kind 'beat' with invalid fields"),
        (
            {**_ANNOUNCE, "numbers": [1, True]},
            "received a message of kind 'announce' with invalid fields",
        ),
        (hello(1, 2, pid="1"), "received a message of kind 'hello' with invalid fields"),
    ],
)
def test_other_messages_are_taken_for_a_broken_connection(message, words) -> None:
    with pytest.raises(ConnectionError, match=words):
        _read(message)


def _read(message: dict[str, Any]) -> Any:
    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(as_bytes(message))
        return await read_message(reader)

    return asyncio.run(read())


@pytest.fixture
def asyncio_is_silent(caplog) -> Iterator[None]:
    """The event loop of process 0 has logged no unretrieved task error."""
    caplog.set_level(logging.WARNING)
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


@pytest.fixture(scope="module")
def two() -> Iterator[list[Group]]:
    groups = joined(2, _LIMITS)
    yield groups
    for group in groups:
        group.abandon()


@pytest.mark.usefixtures("asyncio_is_silent")
@pytest.mark.parametrize(
    "message",
    [
        *_NO_MESSAGES,
        _BEAT,
        {"kind": "hello"},
        {**hello(1, 2), "process_id": "1"},
        {**hello(1, 2), "process_id": True},
        {**hello(1, 2), "num_processes": None},
        {**hello(1, 2), "facts": ["host"]},
        {**hello(1, 2), "facts": {"host": "h"}},
        hello(1, 2, address=None),
        hello(1, 2, same=[1]),
    ],
    ids=str,
)
def test_unknown_client_is_disconnected_and_the_group_continues(two, message) -> None:
    with connected(two[0].identity.port, message, claim="member 1") as connection:
        assert connection.recv(1) == b""
    assert together(2, lambda i: two[i].exchange("position", i)) == [[0, 1]] * 2


@pytest.mark.usefixtures("asyncio_is_silent")
@pytest.mark.parametrize(
    "message",
    [
        *_NO_MESSAGES,
        {**_BEAT, "position": "nowhere"},
        {**_BEAT, "name": None},
        {**_BEAT, "step": "one"},
        {**_BEAT, "moves": [1]},
        {**_EXCHANGE, "stream": ["main"]},
        {**_EXCHANGE, "number": None},
        {**_EXCHANGE, "name": {}},
        {**_EXCHANGE, "limit_s": "soon"},
        {**_EXCHANGE, "setting": 3},
        {key: _EXCHANGE[key] for key in _EXCHANGE if key != "value"},
        {"kind": "leave", "stream": 3},
        {**_ANNOUNCE, "topic": None},
        {**_ANNOUNCE, "numbers": 1},
        {**_ANNOUNCE, "numbers": [1, "2"]},
        {**_ANNOUNCE, "numbers": [[1]]},
        {"kind": "error", "text": None},
    ],
    ids=str,
)
def test_member_that_says_nonsense_is_named_as_lost(message) -> None:
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        joining = [executor.submit(Group, identity(i, 3, port), _LIMITS) for i in range(2)]
        with connected(port, hello(2, 3), claim="member 2") as connection:
            members = [future.result() for future in joining]
            connection.sendall(as_bytes(message))
            try:
                for error in together(2, lambda i: members[i].exchange("position", None)):
                    assert isinstance(error, UnavailableError)
                    assert "worker 2 (host2:1) died in your code" in str(error)
            finally:
                for member in members:
                    member.abandon()


_ANSWERS: list[dict[str, Any]] = [
    {"kind": "welcome", "address": "a"},
    {"kind": "progress", "num_missing": 1, "missing": "worker 1"},
    {"kind": "beat"},
    {"kind": "exchanged", "stream": "main", "number": 0, "runs": [[1, 1], [None, 1]]},
    {"kind": "abandoned", "stream": "main", "number": 0, "by": ["worker 1"]},
    {"kind": "announced", "announcements": [["t", 1, [1]], ["t", 0, []]]},
    {"kind": "gone"},
    {"kind": "verdict", "error": "ValueError", "message": "m", "lost": None, "silent_s": 1.5},
]


@pytest.mark.parametrize("answer", _ANSWERS, ids=lambda one: one["kind"])
def test_answers_are_read_as_they_were_written(answer) -> None:
    assert _answer(answer) == answer


@pytest.mark.parametrize(
    "answer",
    [
        *_NO_MESSAGES,
        {"kind": "welcome", "address": 1},
        {"kind": "abandoned", "stream": "main", "number": 0, "by": [1]},
        {"kind": "exchanged", "stream": "main", "number": 0, "runs": [[1, 1]]},
        {"kind": "exchanged", "stream": "main", "number": 0, "runs": [[1, 3], [2, -1]]},
        {"kind": "exchanged", "stream": "main", "number": 0, "runs": [1, 2]},
        {"kind": "exchanged", "stream": "main", "number": 0, "runs": [[1, True], [2, 1]]},
        {"kind": "announced", "announcements": [["t", 1, ["1"]]]},
        {"kind": "announced", "announcements": [["t", True, [1]]]},
        {"kind": "announced", "announcements": ["t"]},
        {"kind": "verdict", "error": "ValueError", "message": "m"},
    ],
    ids=str,
)
def test_other_answers_are_taken_for_a_broken_connection(answer) -> None:
    with pytest.raises(ConnectionError):
        _answer(answer)


def _answer(message: dict[str, Any] | bytes) -> Any:
    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(as_bytes(message))
        reader.feed_eof()
        return await read_answer(reader, 2)

    return asyncio.run(read())


_VALID = [_BEAT, _EXCHANGE, _ANNOUNCE, {"kind": "leave", "stream": "main"}, *_ANSWERS]
_MESSAGES = st.one_of(
    JSON,
    st.builds(
        lambda message, name, value: {**message, name: value},
        st.sampled_from([*_VALID, hello(1, 2), {"kind": "error", "text": ""}, {"kind": "gone"}]),
        st.sampled_from(sorted({name for one in _VALID for name in one} | {"facts", "text"})),
        JSON,
    ),
)
_BYTES = st.one_of(
    st.binary(max_size=200),
    _MESSAGES.map(frame),
    st.builds(lambda message, at: frame(message)[:at], _MESSAGES, st.integers(0, 60)),
)


@fuzz
@given(st.lists(_BYTES, min_size=1, max_size=20))
def test_any_bytes_are_a_message_or_a_broken_connection(frames) -> None:
    async def read() -> None:
        for data in frames:
            for parse in (read_message, lambda reader: read_answer(reader, 2)):
                reader = asyncio.StreamReader()
                reader.feed_data(data)
                reader.feed_eof()
                try:
                    assert isinstance(await parse(reader), dict)
                except ConnectionError:
                    assert len(reader._buffer) <= len(data)

    asyncio.run(read())


class _Writer:
    """Writes to nobody."""

    def write(self, data: bytes) -> None:
        assert data


@fuzz
@given(st.lists(_BYTES, min_size=1, max_size=20))
def test_hub_survives_any_message_of_a_member(frames) -> None:
    hub: Any = Hub(["a", "b"], _LIMITS, 0, Credentials(), 10)
    for member in hub._members:
        member.writer = _Writer()

    async def handle() -> None:
        for data in frames:
            reader = asyncio.StreamReader()
            reader.feed_data(data)
            reader.feed_eof()
            try:
                message = await read_message(reader)
            except ConnectionError:
                continue
            if message["kind"] == "hello":
                assert isinstance(hub._refusal(message), str | None)
                if hub._refusal(message) is None:
                    hub._compare(message)
            else:
                hub._handle(1, message)
            hub._judge()

    asyncio.run(handle())
