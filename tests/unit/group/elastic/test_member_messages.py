"""Messages between members that are broken."""

from __future__ import annotations

import socket

import pytest

from stratagem.group.elastic.inbox import receive_message


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"\xff\xff\xff\xff", "which is too large"),
        (b"\0\0\0\x02{]", "received no message"),
        (b"\0\0\0\x02[]", "holds no JSON object"),
        (b"\0\0", "closed by the other side"),
    ],
)
def test_a_broken_message_is_an_error_of_the_connection(sent, words) -> None:
    theirs, ours = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(sent)
        with pytest.raises(ConnectionError, match=words):
            receive_message(ours, 1)
