"""Who is let in, asked as ZeroMQ asks (RFC 27)."""

from __future__ import annotations

import pytest
import zmq
from zmq.utils import z85

from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import Admission

KEYS = ClusterKeys.make()
KEY = z85.decode(KEYS.client_public)
OTHER = z85.decode(KEYS.server_public)


@pytest.mark.parametrize(
    ("mechanism", "credentials", "password", "status"),
    [
        (b"CURVE", [KEY], b"word", b"200"),
        (b"CURVE", [KEY], None, b"200"),
        (b"CURVE", [OTHER], b"word", b"400"),
        (b"CURVE", [KEY[:-1]], b"word", b"400"),
        (b"CURVE", [], b"word", b"400"),
        (b"PLAIN", [b"client", b"word"], b"word", b"200"),
        (b"PLAIN", [b"client", b"wor"], b"word", b"400"),
        (b"PLAIN", [b"client", b""], b"word", b"400"),
        (b"PLAIN", [b"client", b""], None, b"400"),
        (b"PLAIN", [], b"word", b"400"),
        (b"NULL", [], None, b"400"),
        (b"GSSAPI", [b"client"], b"word", b"400"),
    ],
)
def test_only_clients_of_the_cluster_are_let_in(mechanism, credentials, password, status) -> None:
    with zmq.Context() as context:
        admission = Admission(context, KEYS.client_public, password)
        with context.socket(zmq.REQ) as asking:
            asking.linger = 0
            asking.connect("inproc://zeromq.zap.01")
            about = [b"domain", b"127.0.0.1", b"identity"]
            asking.send_multipart([b"1.0", b"7", *about, mechanism, *credentials])
            admission.answer()
            answer = asking.recv_multipart()
        assert answer[:3] == [b"1.0", b"7", status]
        assert len(answer) == 6
        admission.socket.close()
