"""Fuzz tests of journals: what is read is what was written, or the damage is named."""

from __future__ import annotations

import contextlib
import json
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import DataLossError
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.journal import _RECORD, MARK, Journal
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.wire import pack
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.server import ParameterServer
from tests.fuzzing import JSON, fuzz
from tests.unit.parameter_server.fuzzing import damaged
from tests.unit.parameter_server.server.update_rules import Momentum

_KEYS = ClusterKeys.make()


@pytest.fixture(scope="module")
def journal(tmp_path_factory) -> Path:
    """A journal of all that a server writes."""
    path = tmp_path_factory.mktemp("journal") / "journal"
    with (
        ParameterServer(_KEYS, journal=path, journal_interval_s=1e6) as server,
        Connections(_KEYS, [server.address]) as connections,
    ):
        client = ServerClient(connections)
        client.create(ShardLayout("v", (3,), "float32", (0,), (3,)), np.ones(3, np.float32))
        table = ShardLayout("table", (40, 2), "float32", (0,), (40,), has_rows=True)
        client.create(table, np.ones((40, 2), np.float32))
        client.set_rule(Momentum(), ["v", "table"])
        for number in range(3):
            rows = {"table": (np.array([number]), np.ones((1, 2), np.float32))}
            assert client.push({"v": np.ones(3, np.float32)}, rows).is_used
            client.journal()
    return path


@contextlib.contextmanager
def quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.mark.slow
@fuzz
@given(data=st.data())
def test_damaged_journal_has_the_first_records_or_is_refused(journal, tmp_path, data) -> None:
    path = tmp_path / "journal"
    changed = data.draw(damaged(journal.read_bytes()))
    path.write_bytes(changed)
    with Journal(journal) as whole:
        wanted = [[bytes(frame) for frame in pack(one)] for one in whole.messages]
    try:
        with quietly(), Journal(path) as read:
            got = [[bytes(frame) for frame in pack(one)] for one in read.messages]
            num_dropped = read.num_dropped
    except DataLossError:
        assert path.read_bytes() == changed
        return
    if changed.startswith(journal.read_bytes()[:20]):
        # A record that was doubled is intact too.
        assert all(one in wanted for one in got)
    # The head of an earlier version is renewed.
    assert num_dropped or path.read_bytes()[20 : len(changed)] == changed[20:]


def test_refused_journal_of_an_earlier_version_keeps_its_head(journal, tmp_path) -> None:
    path = tmp_path / "journal"
    whole = journal.read_bytes()
    changed = whole[:18] + b"2" + whole[19:21] + bytes([whole[21] ^ 1]) + whole[22:]
    path.write_bytes(changed)
    with pytest.raises(DataLossError, match="fails its checksum"):
        Journal(path)
    assert path.read_bytes() == changed


@fuzz
@given(data=st.data())
def test_forged_journal_is_restored_or_refused(journal, tmp_path, data) -> None:
    """All of its checksums are right."""
    path = tmp_path / "journal"
    with Journal(journal) as whole:
        entry = whole.messages[0]
        frames = [bytes(frame) for frame in pack(entry)]
    head = frames[0].partition(b"\0")
    header = json.loads(head[0])
    change = data.draw(st.sampled_from(["field", "part", "bytes"]))
    if change == "field":
        header["fields"][data.draw(st.sampled_from([*header["fields"]]))] = data.draw(JSON)
    elif change == "part":
        part = data.draw(st.sampled_from(header["fields"]["parts"]))
        part[data.draw(st.sampled_from([*part]))] = data.draw(JSON)
        part.get("spec") and part["spec"] and isinstance(part["spec"], dict) and part[
            "spec"
        ].update(shape=data.draw(st.lists(st.integers(-2, 2**50), max_size=3)))
    frames[0] = json.dumps(header, separators=(",", ":")).encode() + head[1] + head[2]
    if change == "bytes":
        frames[0] = data.draw(damaged(frames[0]))
    lengths = struct.pack(f"<{len(frames)}Q", *map(len, frames))
    body = struct.pack("<I", len(frames)) + lengths + b"".join(frames)
    record = _RECORD.pack(MARK, len(body), zlib.crc32(body))
    whole_head = journal.read_bytes()[:20]
    path.write_bytes(whole_head + record + zlib.crc32(record).to_bytes(4, "little") + body)
    with contextlib.suppress(DataLossError), quietly():
        ParameterServer(_KEYS, journal=path, journal_interval_s=1e6).close()
