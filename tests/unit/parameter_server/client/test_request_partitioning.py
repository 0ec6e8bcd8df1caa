"""One message to each server, however many shards of a variable it holds."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.keys import ClusterKeys
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.server import ParameterServer
from tests.unit.parameter_server.server.update_rules import Momentum

# Of 17 rows; five shards on two servers, not in turn.
ROWS, SERVERS = (4, 3, 4, 3, 3), (0, 0, 1, 0, 1)


@pytest.fixture
def asked(monkeypatch) -> Counter:
    """How often each server was asked for each kind."""
    counts: Counter = Counter()
    ask_all = Connections.ask_all

    def counting(self, messages, **options):
        counts.update((message.kind, server) for server, message in messages.items())
        return ask_all(self, messages, **options)

    monkeypatch.setattr(Connections, "ask_all", counting)
    return counts


@pytest.mark.parametrize("has_rows", [False, True])
def test_shards_on_one_server_travel_together(asked, has_rows) -> None:
    keys = ClusterKeys.make()
    rng = np.random.default_rng(0)
    value = rng.normal(size=(17, 2)).astype("float32")
    placement = ShardLayout("v", (17, 2), "float32", SERVERS, ROWS, has_rows)
    with (
        ParameterServer(keys) as one,
        ParameterServer(keys) as other,
        Connections(keys, [one.address, other.address]) as connections,
    ):
        served = ServerClient(connections)
        assert served.create(placement, value)
        assert not served.create(placement, value)
        served.set_rule(Momentum(), ["v"])
        ids = np.array([16, 0, 5, 5, 8])
        np.testing.assert_array_equal(served.pull_rows("v", ids), value[ids])
        served.assign("v", value, sign=1)
        served.scatter("v", ids[:2], np.ones((2, 2)), sign=1)
        value *= 2
        value[ids[:2]] += 1
        pushed = served.push({"v": np.ones((17, 2), np.float32)}, pull=["v"])
        np.testing.assert_allclose(pushed.values["v"], value - 0.1, rtol=1e-5)
        np.testing.assert_array_equal(served.pull(["v"])["v"], pushed.values["v"])
    once = {("pull_rows", 0), ("assign", 0), ("scatter", 0), ("push", 0), ("pull", 0), ("rule", 0)}
    assert asked == Counter(
        {
            **{(kind, server): 1 for kind, _ in once for server in (0, 1)},
            ("create", 0): 2,
            ("create", 1): 2,
        }
    )


def test_servers_without_gradients_are_asked_for_values_at_the_same_time(asked) -> None:
    keys = ClusterKeys.make()
    with (
        ParameterServer(keys) as one,
        ParameterServer(keys) as other,
        Connections(keys, [one.address, other.address]) as connections,
    ):
        served = ServerClient(connections)
        for server, name in enumerate("vw"):
            place = ShardLayout(name, (3,), "float32", (server,), (3,))
            served.create(place, np.full(3, server, np.float32))
        served.set_rule(Momentum(), ["v"])
        asked.clear()
        pushed = served.push({"v": np.ones(3, np.float32)}, pull=["w", "v", "v:v"])
        assert asked == {("push", 0): 1, ("pull", 1): 1}
        assert (pushed.is_used, pushed.num_discarded) == (True, 0)
        np.testing.assert_allclose(pushed.values["v"], -0.1)
        np.testing.assert_array_equal(pushed.values["v:v"], 1)
        np.testing.assert_array_equal(pushed.values["w"], 1)
        asked.clear()
        assert served.push({}, pull=["w"]).is_used
        assert asked == {("pull", 1): 1}
