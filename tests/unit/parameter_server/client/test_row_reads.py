"""Rows read from servers with a cache: which are asked for, and how old they may be."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import UnavailableError
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client import row_reads
from stratagem.parameter_server.client.client import NeededRules, SentRules, ServerClient
from stratagem.parameter_server.client.row_cache import RowCache
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.updates import UpdateMode
from tests.unit.parameter_server.client.test_client import place
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.server.test_server import Server
from tests.unit.parameter_server.server.update_rules import Momentum

NUM_SERVERS = 3
IDS = np.array([[2, 19, 2], [7, 0, 19]])
SERVERS_OF_IDS = {0, 1}  # of shards of 5 rows
VALUE = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
GRADIENTS = np.ones((6, 3), np.float32)


@pytest.fixture
def connections() -> Iterator[Connections]:
    keys = ClusterKeys.make()
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(ParameterServer(keys)) for _ in range(NUM_SERVERS)]
        addresses = [server.address for server in servers]
        yield stack.enter_context(Connections(keys, addresses))


def client_of(connections: Connections, max_age_steps: int = 3, **options: Any) -> ServerClient:
    """A client with a cache, which knows a table of ones that it may train."""
    cache = RowCache(max_rows=100, max_age_steps=max_age_steps, **options)
    client = ServerClient(connections, row_cache=cache)
    client.create(place("table", VALUE), VALUE)
    client.set_rule(Momentum(), ["table"])
    return client


def step(client: ServerClient, ids: np.ndarray = IDS) -> tuple[np.ndarray, int]:
    """Returns the rows of a step, and how many of them were read from servers."""
    client.rows.begin_step()
    rows = client.pull_rows("table", ids, may_be_cached=True)
    return rows, client.rows.take_counts().get("misses", -1)


def test_rows_of_the_last_steps_are_not_asked_for(connections) -> None:
    client, other = client_of(connections), client_of(connections, 0)
    old, count = step(client)
    np.testing.assert_array_equal(old, VALUE[IDS])
    assert count == 4
    other.scatter("table", np.array([2]), np.ones((1, 3), np.float32))
    for count in (1, 0, 0):
        rows, asked = step(client, np.append(IDS, 5))
        np.testing.assert_array_equal(rows[:6].reshape(*IDS.shape, 3), old)
        assert asked == count
    rows, count = step(client)
    assert count == 4
    assert (rows[0, 0] == 1).all()
    other.scatter("table", np.array([2]), np.zeros((1, 3), np.float32))
    assert (client.pull_rows("table", np.array([2])) == 0).all()  # a read outside of steps


class Asked:
    """Numbers of requested rows by table shard, one dictionary for each message."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[tuple[int, dict[str, int]]] = []
        ask_all = Connections.ask_all

        def counting(own: Connections, messages: dict[int, Message], **options: Any) -> Any:
            for server, message in messages.items():
                if message.kind == "pull_rows":
                    pairs = zip(message.fields["names"], map(len, message.arrays), strict=True)
                    self.messages.append((server, dict(pairs)))
            return ask_all(own, messages, **options)

        monkeypatch.setattr(Connections, "ask_all", counting)


@pytest.mark.parametrize("is_cached", [False, True])
def test_rows_of_several_tables_come_together(connections, monkeypatch, is_cached) -> None:
    client = client_of(connections)
    other = -VALUE[:, :2]
    client.create(place("table 2", other, 1), other)
    client.rows.begin_step()
    asked = Asked(monkeypatch)
    wanted = [
        ("table", IDS, VALUE),
        ("table 2", np.array([], np.int32), other),
        ("table", np.array([4, 2]), VALUE),
        ("table 2", np.array([[3], [3]]), other),
        ("table:v", np.array([0]), np.zeros((20, 3))),
    ]
    wanted = wanted[: 4 if is_cached else 5]
    got = client.pull_rows_of([one[:2] for one in wanted], may_be_cached=is_cached)
    for rows, (_, ids, value) in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(rows, value[ids])
    totals: Counter[str] = Counter()
    for _, names in asked.messages:
        totals.update(names)
    assert totals["table/part_0"] == 3  # rows 0, 2 and 4, though 2 is in two lookups
    assert totals["table 2"] == 1
    assert len(asked.messages) == len({server for server, _ in asked.messages})


@pytest.mark.parametrize("most_bytes", [0, 40, 10**6])
def test_large_answers_are_split(connections, monkeypatch, most_bytes) -> None:
    client = client_of(connections)
    for number in range(4):
        client.create(place(f"table {number}", VALUE, 1), VALUE + number)
    asked = Asked(monkeypatch)
    monkeypatch.setattr(row_reads, "_MOST_ANSWER_BYTES", most_bytes)
    ids = np.array([1, 5, 5])  # 24 bytes of distinct rows
    got = client.pull_rows_of([(f"table {number}", ids) for number in range(4)])
    for number, rows in enumerate(got):
        np.testing.assert_array_equal(rows, VALUE[ids] + np.float32(number))
    servers = [client.placement_of(f"table {number}").servers[0] for number in range(4)]
    assert len({*servers}) < 4
    assert len(asked.messages) == (len({*servers}) if most_bytes > 40 else 4)
    assert sum(sum(names.values()) for _, names in asked.messages) == 8


def test_no_rows_are_no_message(connections, monkeypatch) -> None:
    client, asked = client_of(connections), Asked(monkeypatch)
    assert client.pull_rows_of([]) == []
    assert client.pull_rows("table", np.zeros((2, 0), int)).shape == (2, 0, 3)
    assert asked.messages == []


def test_age_of_zero_is_no_cache(connections) -> None:
    client, other = client_of(connections, 0), client_of(connections, 0)
    for number in (1.0, 2.0):
        other.scatter("table", IDS.reshape(-1), number * GRADIENTS)
        assert (step(client)[0] == number).all()
        assert (step(client)[0] == number).all()


@pytest.mark.parametrize("reads_own_updates", [True, False])
def test_own_updates_are_read_at_once_or_within_the_limit(connections, reads_own_updates) -> None:
    client = client_of(connections, 2, reads_own_updates=reads_own_updates)
    before, _ = step(client)
    client.push({}, {"table": (IDS.reshape(-1), GRADIENTS)})
    after = client.pull_rows("table", IDS)
    assert (after < before).all()
    seen = [bool((step(client)[0] == after).all()) for _ in range(3)]
    assert seen == ([True] * 3 if reads_own_updates else [False, False, True])


def test_own_assignments_are_read_at_once(connections) -> None:
    client = client_of(connections, 9, reads_own_updates=False)
    step(client)
    client.scatter("table", np.array([7]), np.full((1, 3), 5, np.float32))
    assert (step(client)[0][1, 0] == 5).all()
    client.assign("table", np.zeros_like(VALUE))
    assert (step(client)[0] == 0).all()


def test_failed_push_counts_as_done(connections) -> None:
    client = client_of(connections, 9)
    step(client)
    with pytest.raises(ServerError):
        client.push({}, {"table": (IDS.reshape(-1), GRADIENTS[:, :2])})
    assert step(client)[1] == 4


def test_slots_are_not_cached(connections) -> None:
    client = client_of(connections, 9, reads_own_updates=False)
    for count in (0.0, 1.0):
        rows = client.pull_rows("table:v", np.array([7]), may_be_cached=True)
        assert (rows == count).all()
        client.push({}, {"table": (np.array([7]), GRADIENTS[:1])})


def test_gradients_of_cached_rows_are_as_stale_as_these(connections) -> None:
    client = client_of(connections, 9, reads_own_updates=False)
    client.set_rule(Momentum(), ["table"], UpdateMode(max_staleness=1))
    pairs = {"table": (IDS.reshape(-1), GRADIENTS)}
    step(client)
    num_discarded = []
    for _ in range(3):
        step(client)
        num_discarded.append(client.push({}, pairs).num_discarded)
    assert num_discarded == [0, 0, len(SERVERS_OF_IDS)]
    client.rows.drop_cached()
    step(client)
    assert client.push({}, pairs).num_discarded == 0


def test_restarted_server_is_asked_again(tmp_path) -> None:
    server = Server(tmp_path)
    try:
        with Connections(server.keys, [server.running.address]) as connections:
            client = ServerClient(connections, row_cache=RowCache(max_rows=99, max_age_steps=99))
            placement = place("table", VALUE, 1)
            client.create(placement, VALUE)
            client.journal()
            client.scatter("table", np.array([7]), GRADIENTS[:1])  # will be lost
            assert step(client)[1] == 4
            assert step(client)[1] == 0
            server.restart()
            client.describe()  # the first answer of the new run
            rows, count = step(client)
            assert count == 4
            np.testing.assert_array_equal(rows, VALUE[IDS])
    finally:
        server.running.close()


# Options of the cache of rows, and training with it.

SHAPE = (9000, 8)  # smaller tables are read whole
IDS_OF_ROW_CACHE = np.random.default_rng(0).integers(20, size=(6, 8))


class Model:
    """Two tables, of which one is trained, with a loss of both."""

    def __init__(self) -> None:
        values = np.random.default_rng(1).normal(size=SHAPE).astype("float32")
        self.layers = [keras.layers.Embedding(*SHAPE) for _ in range(2)]
        for layer in self.layers:
            layer.build((None,))
            layer.embeddings.assign(values)
        self.tables = [layer.embeddings for layer in self.layers]
        self.optimizer = keras.optimizers.Adagrad(0.1)
        self.optimizer.build(self.tables[:1])

    def step(self, ids: Any) -> Any:
        def loss() -> Any:
            trained, frozen = (sg.nn.embedding_lookup(table, ids) for table in self.tables)
            return jnp.sum(jnp.square(trained - 0.5 * frozen))

        value, grads = sg.value_and_grad(loss, self.tables[:1])
        self.optimizer.apply_gradients([(grads[0], self.tables[0])])
        return value


def train(row_cache: sg.coordinator.RowCache | None) -> tuple[list[float], dict[str, int]]:
    """Returns the losses of steps on a worker, and the counts of its cache."""
    with coordinated(row_cache=row_cache) as coordinator:
        with coordinator.strategy.scope():
            model = Model()

        def step(ids: Any) -> Any:
            return sg.get_strategy().run(model.step, args=(jnp.asarray(ids),))

        losses = [
            float(coordinator.schedule(step, args=(ids,)).fetch()) for ids in IDS_OF_ROW_CACHE
        ]
        return losses, coordinator.row_cache_counts()


@pytest.mark.slow
def test_rows_that_others_do_not_train_make_no_difference() -> None:
    wanted, counts = train(None)
    assert counts == {"hits": 0, "misses": 0}
    num_reads = 2 * sum(len({*ids.tolist()}) for ids in IDS_OF_ROW_CACHE)
    num_frozen = num_reads // 2 - len({*IDS_OF_ROW_CACHE.reshape(-1).tolist()})
    for max_age, num_hits in ((0, 0), (1, None), (len(IDS_OF_ROW_CACHE), num_frozen)):
        losses, counts = train(sg.coordinator.RowCache(max_rows=100, max_age_steps=max_age))
        np.testing.assert_allclose(losses, wanted, rtol=1e-6)
        if max_age:
            assert counts["hits"] + counts["misses"] == num_reads
        assert num_hits in (None, counts["hits"])


def test_own_updates_may_come_late() -> None:
    wanted, _ = train(None)
    options = sg.coordinator.RowCache(
        max_rows=100, max_age_steps=len(IDS_OF_ROW_CACHE), reads_own_updates=False
    )
    losses, counts = train(options)
    assert losses[0] == pytest.approx(wanted[0], rel=1e-6)
    assert losses[-1] > wanted[-1]  # of rows that were not trained yet
    num_reads = 2 * sum(len({*ids.tolist()}) for ids in IDS_OF_ROW_CACHE)
    assert counts["misses"] == 2 * len({*IDS_OF_ROW_CACHE.reshape(-1).tolist()})
    assert counts["hits"] == num_reads - counts["misses"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_rows": 0, "max_age_steps": 1}, "max_rows=0"),
        ({"max_rows": True, "max_age_steps": 1}, "max_rows=True"),
        ({"max_rows": 1.5, "max_age_steps": 1}, "max_rows=1.5"),
        ({"max_rows": 1, "max_age_steps": -1}, "max_age_steps=-1"),
        ({"max_rows": 1, "max_age_steps": None}, "max_age_steps=None"),
        ({"max_rows": 1, "max_age_steps": 1, "reads_own_updates": 0}, "reads_own_updates=0"),
    ],
)
def test_invalid_options_are_refused(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        sg.coordinator.RowCache(**options)


def test_strategy_refuses_what_it_cannot_use() -> None:
    cache = sg.coordinator.RowCache(max_rows=1, max_age_steps=1)
    with pytest.raises(ValueError, match="synchronous=True received row_cache=RowCache"):
        sg.ParameterServerStrategy(synchronous=True, row_cache=cache)
    with pytest.raises(TypeError, match="row_cache=100 is of type int"):
        sg.ParameterServerStrategy(row_cache=100)  # pyright: ignore[reportArgumentType]


# Optimizers that are sent again to servers that restarted.


class Sent:
    """Connections that note what is sent."""

    def __init__(self) -> None:
        self.messages: list[tuple[int, Message]] = []

    def ask(self, server: int, message: Message) -> Message:
        self.messages.append((server, message))
        return Message("ok")


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def rules(sent: Any) -> SentRules:
    rules = SentRules(sent)
    for name in ("sgd", "adam"):
        with rules.noted(name, messages_of(name)):
            pass
    return rules


def messages_of(name: str, number: int = 7) -> dict[int, Message]:
    fields = {"optimizer": name, "mode": {"num_needed": 2}, "client": "c", "number": number}
    return {server: Message("rule", fields) for server in (0, 1)}


def test_optimizers_go_to_one_server_again_without_their_mode(rules, sent) -> None:
    assert rules.send(1) == {"sgd", "adam"}
    assert [(to, one.fields["optimizer"]) for to, one in sent.messages] == [(1, "sgd"), (1, "adam")]
    assert all(one.fields["mode"] is None for _, one in sent.messages)
    clients = {one.fields["client"] for _, one in sent.messages}
    assert len(clients | {"c"}) == 3  # the numbers of the first client go on


def test_only_those_that_are_needed_are_sent_and_none_that_was_dropped(rules, sent) -> None:
    rules.forget("adam")
    assert rules.send(0, ["adam", "lion"]) == set()
    assert rules.send(0, ["sgd", "lion"]) == {"sgd"}
    assert [one.fields["optimizer"] for _, one in sent.messages] == ["sgd"]


def test_server_that_restarts_while_others_have_not_answered_gets_the_optimizer(
    rules, sent
) -> None:
    """It has answered, so that only this sends the optimizer again."""
    with rules.noted("lion", messages_of("lion")):
        assert rules.send(1, ["lion"]) == {"lion"}
    assert [(to, one.fields["optimizer"]) for to, one in sent.messages] == [(1, "lion")]


def test_optimizer_that_is_refused_is_not_sent_again(rules, sent) -> None:
    for name in ("lion", "sgd"):
        with pytest.raises(ValueError, match="another"), rules.noted(name, messages_of(name, 8)):
            raise ValueError("another optimizer")
    assert rules.send(0) == {"sgd", "adam"}
    assert rules.send(0, ["lion"]) == set()


def needs(*optimizers: str) -> Message:
    return Message("needs_rule", {"optimizers": [*optimizers]})


def test_servers_that_lack_one_are_asked_again(rules, sent) -> None:
    needed = NeededRules(rules)
    assert needed.supply({0: Message("ok"), 1: needs("sgd")}) == [1]
    assert needed.supply({0: Message("ok"), 1: Message("ok")}) == []
    assert len(sent.messages) == 1


def test_wait_for_another_process_that_never_sends_one_ends(rules, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.2")
    needed = NeededRules(rules)
    lacking = {0: needs("lion")}
    assert needed.supply(lacking) == [0]
    time.sleep(0.2)
    with pytest.raises(UnavailableError, match=r"waited 0.2 s for the optimizers \['lion'\]"):
        needed.supply(lacking)


# One message to each server, however many shards of a variable it holds.

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
