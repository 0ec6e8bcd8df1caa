"""Invalid messages to the port of a group do it no harm."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cluster.addresses import free_ports
from stratagem.errors import UnavailableError
from stratagem.group.assignments import AssignmentNotes, Assignments
from stratagem.group.authentication.connections import frame, read_answer, read_message
from stratagem.group.authentication.secret import Credentials, Secret
from stratagem.group.hub import Hub
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits, Verdict
from tests.fuzzing import JSON, fuzz
from tests.unit.group.authentication import peers
from tests.unit.group.process_group.members import (
    as_bytes,
    connected,
    free_port,
    hello,
    identity,
    listed,
    running,
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


_VERDICT = {"kind": "verdict", **dataclasses.asdict(Verdict("ValueError", "m", silent_s=1.5))}
_EXCHANGED = {"kind": "exchanged", "stream": "main", "number": 0}
_ANSWERS: list[dict[str, Any]] = [
    {"kind": "welcome", "address": "a"},
    {"kind": "progress", "num_missing": 1, "missing": "worker 1"},
    {"kind": "beat"},
    {**_EXCHANGED, "runs": [[1, 1], [None, 1]]},
    {"kind": "abandoned", "stream": "main", "number": 0, "by": ["worker 1"]},
    {"kind": "announced", "announcements": [["t", 1, [1]], ["t", 0, []]]},
    {"kind": "gone"},
    _VERDICT,
]


async def _read_answer(reader: asyncio.StreamReader) -> Any:
    return await read_answer(reader, 2)


@pytest.mark.parametrize(
    ("parse", "message"),
    [
        *(
            (read_message, one)
            for one in (_BEAT, _EXCHANGE, _ANNOUNCE, hello(1, 2), {"kind": "gone"})
        ),
        *((_read_answer, one) for one in _ANSWERS),
    ],
)
def test_messages_are_read_as_they_were_written(parse, message) -> None:
    assert _read(message, parse) == message


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "closed by the other side"),
        (b"\x00\x00\x00\x09{", "closed by the other side"),
        (b"\x00\x00\x00\x03abc", "received no message"),
        (b"\x00\x01\x00\x00" + b"[" * 2**16, "received no message"),
        (b"GET / HTTP/1.1\r\n\r\n", r"received a frame of \d+ bytes, which is too large"),
        (b"\x00\x00\x00\x02[]", "a frame that holds no JSON object"),
        ({"kind": "dance"}, "received an unknown message: {'kind': 'dance'}"),
        ({**_BEAT, "position": "nowhere"}, "received a message of kind 'beat' with invalid fields"),
        ({**_ANNOUNCE, "numbers": [1, True]}, "an unknown message: {'kind': 'announce'"),
        ({**_ANNOUNCE, "numbers": [[1]]}, "an unknown message: {'kind': 'announce'"),
        (hello(1, 2, pid="1"), "received an unknown message: {'kind': 'hello'"),
        *(
            (one, "received an unknown message")
            for one in (
                {"kind": 3},
                {**_BEAT, "step": True},
                {**_BEAT, "name": None},
                {**_EXCHANGE, "stream": ["main"]},
                {"kind": "error", "text": None},
            )
        ),
        ({**_EXCHANGE, "limit_s": "soon"}, "received "),
        ({key: _EXCHANGE[key] for key in _EXCHANGE if key != "value"}, "received "),
    ],
)
def test_other_messages_are_taken_for_a_broken_connection(message, words) -> None:
    with pytest.raises(ConnectionError, match=words):
        _read(message, read_message)


@pytest.mark.parametrize(
    "answer",
    [
        *_NO_MESSAGES,
        {"kind": "welcome", "address": 1},
        {"kind": "abandoned", "stream": "main", "number": 0, "by": [1]},
        *(
            {**_EXCHANGED, "runs": runs}
            for runs in ([[1, 1]], [[1, 3], [2, -1]], [1, 2], [[1, True], [2, 1]])
        ),
        *(
            {"kind": "announced", "announcements": one}
            for one in ([["t", 1, ["1"]]], [["t", True, [1]]], ["t"])
        ),
        {"kind": "verdict", "error": "ValueError", "message": "m"},
    ],
    ids=str,
)
def test_other_answers_are_taken_for_a_broken_connection(answer) -> None:
    with pytest.raises(ConnectionError):
        _read(answer, _read_answer)


def _read(message: dict[str, Any] | bytes, parse: Callable[..., Any]) -> Any:
    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(as_bytes(message))
        reader.feed_eof()
        return await parse(reader)

    return asyncio.run(read())


@pytest.fixture
def asyncio_is_silent(caplog) -> Iterator[None]:
    """The event loop of process 0 has logged no unretrieved task error."""
    caplog.set_level(logging.WARNING)
    yield
    assert [record.getMessage() for record in caplog.get_records("call")] == []


@pytest.fixture(scope="module")
def two() -> Iterator[list[Group]]:
    with running(2, _LIMITS) as groups:
        yield groups


@pytest.mark.usefixtures("asyncio_is_silent")
@pytest.mark.parametrize(
    ("message", "claim"),
    [
        *(
            (one, "member 1")
            for one in (
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
            )
        ),
        (hello(1, 2), "member 0"),  # another rank than was proved
        (hello(1, 2, host="h" * 2**20), "member 1"),  # too long
    ],
    ids=lambda one: str(one)[:200],
)
def test_unknown_client_is_disconnected_and_the_group_continues(two, message, claim) -> None:
    with connected(two[0].identity.port, claim=claim) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(as_bytes(message))
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) == b""
    assert together(2, lambda i: two[i].exchange("position", i)) == [[0, 1]] * 2


@pytest.mark.usefixtures("asyncio_is_silent")
@pytest.mark.parametrize(
    "message", [_NO_MESSAGES[0], {"kind": "dance"}, {**_EXCHANGE, "number": None}], ids=str
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
            for parse in (read_message, _read_answer):
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


# Notes of assignments outside steps: equal ones pass, and all others end every process.

# What each of three members assigns before a call, and before the next: number, digest before, and
# digest of the new value.
_RATE, _KERNEL = (1, 10, 11), (2, 20, 21)
Assigned = Sequence[tuple[int, int | None, int]]
_EQUAL: dict[str, list[tuple[Assigned, Assigned]]] = {
    "nothing": [((), ())] * 3,
    "one": [((_RATE,), ())] * 3,
    "one after the other": [((_RATE,), (_KERNEL,))] * 3,
    "another order": [((_RATE, _KERNEL), ()), ((_KERNEL, _RATE), ()), ((_RATE, _KERNEL), ())],
    "twice by one": [(((1, 10, 7), (1, 7, 11)), ()), ((_RATE,), ()), ((_RATE,), ())],
    "there and back by one": [((), ()), ((_RATE, (1, 11, 10)), ()), ((), ())],
    "the value that it has": [(((1, 10, 10),), ()), ((), ()), ((), ())],
    "very many": [([(n, 0, n + 5) for n in range(100)], ())] * 3,
}
_many = [(n, 0, n + 5) for n in range(100)]
_DIFFERENT: dict[str, tuple[list[tuple[Assigned, Assigned]], str]] = {
    "by process 0 alone": (
        [((_RATE,), ()), ((), ()), ((), ())],
        "worker 0 .* assigned 'v1' outside a step, at train.py:0. worker . .* did not assign",
    ),
    "by the last alone": (
        [((), ()), ((), ()), ((_RATE,), ())],
        "worker 2 .* assigned 'v1' .* at train.py:2. worker . .* did not assign it",
    ),
    "by all but one": (
        [((_RATE,), ()), ((), ()), ((_RATE,), ())],
        "worker 0 .* assigned 'v1' .* worker . .* did not assign it",
    ),
    "unknown before": (
        [((), ()), (((1, None, 11),), ()), ((), ())],
        "worker 1 .* assigned 'v1' .* worker . .* did not assign it",
    ),
    "another value": (
        [((_RATE,), ()), ((_RATE,), ()), (((1, 10, 12),), ())],
        "worker 0 .* assigned 'v1' .* worker 2 .* another value.* at train.py:2",
    ),
    "another value of one of two": (
        [((_RATE, _KERNEL), ()), ((_RATE, (2, 20, 22)), ()), ((_RATE, _KERNEL), ())],
        "worker 0 .* assigned 'v2' .* worker 1 .* another value.* at train.py:1",
    ),
    "one more": (
        [((_RATE,), ()), ((_RATE, _KERNEL), ()), ((_RATE,), ())],
        "worker 1 .* assigned 'v2' .* at train.py:1. worker . .* did not assign it",
    ),
    "one of very many": (
        [(_many, ()), ([*_many[:-1], (99, 0, 1)], ()), (_many, ())],
        "worker 0 .* assigned 'v0' .* worker 1 .* another value",
    ),
    "a call later": (
        [((), (_RATE,)), ((_RATE,), ()), ((), (_RATE,))],
        "worker 1 .* assigned 'v1' .* at train.py:1. worker . .* did not assign it",
    ),
    "in the second interval": (
        [((_RATE,), ()), ((_RATE,), (_KERNEL,)), ((_RATE,), ())],
        "worker 1 .* assigned 'v2' .* at train.py:1. worker . .* did not assign it",
    ),
}
_CALLS: dict[str, Callable[[Group], Any]] = {
    "program": lambda member: member.begin_step(),
    "exchange": lambda member: member.exchange("place", None),
}


def _note(member: Group, assigned: Assigned) -> None:
    for number, before, digest in assigned:
        place = f"train.py:{member.process_id}"
        member.assignments.add(number, f"v{number}", before=before, digest=digest, place=place)


def _act(member: Group, assigned: tuple[Assigned, Assigned], call: str) -> None:
    for part in assigned:
        _note(member, part)
        _CALLS[call](member)
    _CALLS[call](member)


@pytest.fixture(scope="module")
def members():
    with running(3, _LIMITS) as groups:
        yield groups
        assert together(3, lambda index: groups[index].leave()) == [True] * 3


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.parametrize("every", _EQUAL.values(), ids=_EQUAL)
def test_equal_assignments_pass(members, every, call) -> None:
    def act(index: int) -> list[Any]:
        _act(members[index], every[index], call)
        return members[index].exchange("end", None)

    assert together(3, act) == [[None] * 3] * 3


@pytest.mark.parametrize(
    ("case", "call"),
    [
        *((case, "program") for case in _DIFFERENT),
        *(
            (case, call)
            for case in ("by the last alone", "another value", "a call later")
            for call in ("exchange", "none")
        ),
    ],
)
def test_other_assignments_end_all(case, call) -> None:
    """In the next exchange, in the program after the next one, or at the end of the processes."""
    every, words = _DIFFERENT[case]

    def act(index: int) -> bool:
        if call in _CALLS:
            _act(members[index], every[index], call)
        else:
            _note(members[index], [*every[index][0], *every[index][1]])
        return members[index].leave()

    with running(3, _LIMITS) as members:
        ends = together(3, act)
        if call == "none" and case == "a call later":
            assert ends == [True] * 3  # nothing was between
            return
        assert all(end is False or type(end) is RuntimeError for end in ends), ends
        if call == "exchange":
            assert False not in ends
        for member in members:
            assert member.verdict.error == "RuntimeError"
            assert re.match(words, member.verdict.message), member.verdict.message
            assert "broadcast_object" in member.verdict.message


def test_notes_of_a_program_that_did_not_start_belong_to_the_next_try() -> None:
    """One process fails to start a program, and tries again; the others wait in it."""

    def act(index: int) -> Any:
        member = members[index]
        member.begin_step()
        if index == 1:
            member.return_to_step(0)
            member.begin_step()
        for digest in range(3):
            member.assignments.add(1, "v", before=9, digest=digest, place="a")
            member.begin_step()
        return member.exchange("end", None)

    with running(2, _LIMITS) as members:
        assert together(2, act) == [[None] * 2] * 2


def test_memory_of_notes_does_not_grow_with_steps() -> None:
    assignments, both = Assignments(["a", "b"]), [AssignmentNotes(), AssignmentNotes()]
    for step in range(130):
        for process_id, notes in enumerate(both):
            notes.add(1, "rate", before=step, digest=step + 1, place="train.py:1")
            message = notes.take(step)
            is_sent = step in (0, 64, 128)
            assert (message is not None) == is_sent
            if message is not None:
                assert assignments.add(process_id, message) == (process_id, None)
            assert assignments.move(process_id, step + 1) is None
    assert assignments.settle() is None
    assert not any(assignments._sent)
    for process_id, notes in enumerate(both):  # the rest, before an exchange
        message = notes.take(130, is_last=True)
        assert message is not None
        assert not notes
        assert assignments.add(process_id, message) == (process_id, None)
    assert assignments.settle() is None


@pytest.mark.parametrize("lacks", [False, True], ids=["another value", "none"])
def test_one_of_assignments_in_every_step_is_found_while_steps_go_on(lacks: bool) -> None:
    """They go together; a process that waits for the answer stops all."""

    def act(index: int) -> None:
        member = members[index]
        for step in range(10_000):
            if not (lacks and index == 1 and step == 10):
                digest = -1 if index == 1 and step == 10 else step + 1
                member.assignments.add(1, "v1", before=step, digest=digest, place="train.py:1")
            member.begin_step()

    with running(2, _LIMITS) as members:
        for error in together(2, act):
            assert type(error) is RuntimeError
            assert "assigned 'v1' outside a step, at train.py:1" in str(error)
            assert 64 < members[0].num_steps <= 3 * 64


# Processes that wait for process 0 hear that it cannot listen.

# So long that a test which waited for it would be noticed.
_LIMITS_OF_NOTICES = GroupLimits(join_s=600, peer_s=600)
_CREDENTIALS = Credentials(Secret("s" * 32))


@pytest.mark.parametrize("listens", [True, False])
def test_port_of_process_0_that_is_taken_ends_all_with_its_error(listens) -> None:
    """Also if the other program does not answer, or only holds the port for a connection."""
    ports = free_ports(3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        if listens:
            taken.listen()
        errors = together(3, lambda i: Group(listed(i, ports), _LIMITS_OF_NOTICES, _CREDENTIALS))
    for index, error in enumerate(errors):
        assert isinstance(error, ValueError)
        assert f"worker 0 (host0:1) cannot listen on port {ports[0]}: Address already" in str(error)
        assert index == 0 or f"This is worker {index} (host{index}:1)" in str(error)


def test_port_for_notices_is_closed_once_a_process_has_joined() -> None:
    ports = free_ports(2)
    groups = together(2, lambda i: Group(listed(i, ports), _LIMITS_OF_NOTICES))
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", ports[1]))
    finally:
        for group in groups:
            group.abandon()


def test_port_that_is_taken_here_keeps_no_process_from_joining() -> None:
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[1])):
        groups = together(2, lambda i: Group(listed(i, ports), _LIMITS_OF_NOTICES))
    for group in groups:
        assert isinstance(group, Group)
        group.abandon()


@pytest.mark.parametrize(
    ("secret", "sent"),
    [
        ("", frame(_VERDICT)),
        *(
            ("s" * 32, sent)
            for sent in (b"", b"\0\0\0\2[]", frame({"kind": "beat"}), frame(_VERDICT))
        ),
    ],
)
def test_only_a_verdict_of_the_run_ends_the_wait(secret, sent) -> None:
    ports = free_ports(2)
    is_notice = bool(secret) and sent == frame(_VERDICT)
    limits = GroupLimits(join_s=600 if is_notice else 0.5)

    def act(index: int) -> None:
        if index == 0:
            with peers.dialed(ports[1]) as connection, contextlib.suppress(ConnectionError):
                peers.prove(connection, peers.key("notice", secret), "worker 0")
                connection.sendall(sent)
                connection.recv(1)
        else:
            Group(listed(1, ports), limits, _CREDENTIALS)

    _, error = together(2, act)
    assert isinstance(error, ValueError if is_notice else TimeoutError), error
