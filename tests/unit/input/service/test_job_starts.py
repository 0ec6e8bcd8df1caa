"""Saving snapshots: every kind of dataset, interruptions, and datasets that cannot be saved."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.input.service import snapshot
from stratagem.input.service.consumer import ConsumerPosition
from stratagem.input.service.dispatching import ParkedRequests, describe
from stratagem.input.service.job_starts import JobStarts, JoinedStates, Members
from stratagem.input.service.service_state import ServiceState
from stratagem.input.service.splits import ShardingPolicy, SourceFacts
from tests.unit.input.service.servers import LIMIT_S, bucketed, coordinated, input_servers, values


@pytest.fixture(scope="module")
def servers():
    with input_servers(2, worker_timeout_ms=30_000) as servers:
        yield servers


def _read(files: list[int]) -> list[np.ndarray]:
    return [np.array([10 * file + number]) for file in files for number in range(file + 1)]


@pytest.mark.parametrize(
    "dataset",
    [
        sg.input.Dataset(np.arange(500), batch_size=3, shuffle=True),
        sg.input.Dataset(np.arange(7), batch_size=2).repeat(3),
        sg.input.Dataset(np.arange(0), batch_size=2),
        sg.input.Dataset.from_files(list(range(5)), _read),
        sg.input.Dataset.from_generator(lambda: (np.full(1, n) for n in range(9))),
    ],
    ids=["arrays", "repeated", "empty", "files", "generator"],
)
def test_snapshot_is_the_plain_iteration(servers, dataset, tmp_path) -> None:
    sg.input.service.save(dataset, tmp_path / "saved", servers.target)
    assert values(sg.input.Dataset.load(tmp_path / "saved")) == values(dataset.as_source().open(0))


def test_strategies_resume_a_snapshot_at_the_next_batch(servers, tmp_path) -> None:
    dataset = sg.input.Dataset(np.arange(21), batch_size=4, shuffle=True)
    sg.input.service.save(dataset, tmp_path / "saved", servers.target)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])

    def sums(batches: Any) -> list[int]:
        return [
            sum(int(np.sum(part)) for part in strategy.experimental_local_results(batch))
            for batch in batches
        ]

    expected = [int(batch.sum()) for batch in dataset.as_source().open(0)]
    batches = iter(strategy.distribute_dataset(sg.input.Dataset.load(tmp_path / "saved")))
    assert sums(itertools.islice(batches, 3)) == expected[:3]
    state = batches.get_state()
    again = iter(strategy.distribute_dataset(sg.input.Dataset.load(tmp_path / "saved")))
    again.set_state(state)
    assert sums(again) == expected[3:]


def test_large_snapshots_have_several_files(servers, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(snapshot, "_MOST_FILE_BYTES", 3000)
    dataset = sg.input.Dataset(np.arange(4000), batch_size=100)
    sg.input.service.save(dataset, tmp_path, servers.target)
    assert len(sorted(tmp_path.glob("batches-*"))) > 5
    assert values(sg.input.Dataset.load(tmp_path)) == values(dataset)


class _InterruptionError(Exception):
    pass


def test_interrupted_save_continues(servers, tmp_path, monkeypatch) -> None:
    """Each try writes seven batches, and the last one is cut off."""
    dataset = sg.input.Dataset(np.arange(60), batch_size=2, shuffle=True)
    written: list[tuple[int, int]] = []
    add = snapshot._SnapshotWriter.add

    def interrupted(writer: Any, split: int, index: int, batch: Any) -> None:
        add(writer, split, index, batch)
        written.append((split, index))
        if len(written) % 7 == 0:
            raise _InterruptionError

    monkeypatch.setattr(snapshot._SnapshotWriter, "add", interrupted)
    for number in itertools.count():
        assert number < 10
        try:
            sg.input.service.save(dataset, tmp_path, servers.target)
            break
        except _InterruptionError:
            _cut_last(tmp_path)
            del written[-1]
            written.append((-1, number))
    real = [one for one in written if one[0] >= 0]
    assert len(set(real)) == len(real) == 30
    assert values(sg.input.Dataset.load(tmp_path)) == values(dataset.as_source().open(0))


def _cut_last(folder: Path) -> None:
    last = sorted(folder.glob("batches-*"))[-1]
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 1)


def test_finished_and_other_snapshots_are_not_overwritten(servers, tmp_path) -> None:
    dataset = sg.input.Dataset(np.arange(6), batch_size=2)
    sg.input.service.save(dataset, tmp_path, servers.target)
    with pytest.raises(FileExistsError, match="has a finished snapshot"):
        sg.input.service.save(dataset, tmp_path, servers.target)
    (tmp_path / "manifest").unlink()
    other = sg.input.Dataset(np.arange(8), batch_size=2)
    with pytest.raises(ValueError, match="has an unfinished snapshot of a dataset with"):
        sg.input.service.save(other, tmp_path, servers.target)


def test_datasets_without_an_end_or_that_change_are_refused(servers, tmp_path) -> None:
    dataset = sg.input.Dataset(np.arange(6), batch_size=2)
    with pytest.raises(ValueError, match="save received a dataset without an end"):
        sg.input.service.save(dataset.repeat(), tmp_path, servers.target)
    with pytest.raises(ValueError, match="may have other batches when it is read again"):
        sg.input.service.save(iter([np.zeros(2)]), tmp_path, servers.target)


# Positions of consumers: a job resumes at the batches that none of them has returned.


@pytest.fixture(scope="module")
def servers_of_client():
    with input_servers(2) as servers:
        yield servers


@pytest.mark.slow
def test_the_position_of_an_iterator_is_what_it_returned(servers_of_client) -> None:
    dataset = sg.input.Dataset(np.arange(200), batch_size=1, shuffle=True)
    distributed = servers_of_client.distribute(dataset, exactly_once=True)
    source = distributed.as_source()
    for num_read in (0, 1, 57, 199, 200):
        reader = source.open(3)
        before = [next(reader).item() for _ in range(num_read)]
        state = json.loads(json.dumps(reader.state()))
        reader.close()
        again = source.open(3)
        again.restore(state)
        after = [batch.item() for batch in again]
        assert sorted(before + after) == list(range(200))


def test_consumers_of_a_job_resume_together(servers_of_client) -> None:
    dataset = sg.input.Dataset(np.arange(120), batch_size=1)

    def source():
        return servers_of_client.distribute(
            dataset, job_name="resumed", exactly_once=True
        ).as_source()

    readers = [source().open(0) for _ in range(2)]
    before: list[int] = []
    for reader in readers:  # both have joined before their states are taken
        before.append(next(reader).item())
    for number in range(50):
        before.append(next(readers[number % 2]).item())
    _wait_for_two_consumers(readers)
    states = [json.loads(json.dumps(reader.state())) for reader in readers]
    late = [next(readers[0]).item() for _ in range(3)]  # not in the states
    after: list[list[int]] = [[], []]

    def resume(number: int) -> None:
        reader = source().open(0)
        reader.restore(states[number])
        after[number] = [batch.item() for batch in reader]

    threads = [threading.Thread(target=resume, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(before + after[0] + after[1]) == list(range(120))
    assert set(late) <= set(after[0] + after[1])
    with pytest.raises(sg.errors.UnavailableError, match="resumed the job from a state"):
        list(readers[0])
    readers[1].close()


def _wait_for_two_consumers(readers: Any) -> None:
    for reader in readers:
        consumer = reader._consumer
        with consumer.changed:
            assert consumer.changed.wait_for(
                lambda view=consumer: view._view["num_consumers"] == 2, LIMIT_S
            )


def test_coordinated_consumers_resume_at_the_next_step(servers_of_client) -> None:
    dataset = bucketed(6, [4, 3, 2, 1, 5, 6])
    whole = coordinated(servers_of_client, dataset, "not interrupted")
    states: list[Any] = [None, None]
    parts: list[list[Any]] = [[], []]

    def read(index: int, count: int | None) -> None:
        source = servers_of_client.distribute(
            dataset, job_name="interrupted", consumer_index=index, num_consumers=2
        ).as_source()
        reader = source.open(0)
        reader.restore(states[index])
        for _ in range(1000 if count is None else count):
            batch = next(reader, None)
            if batch is None:
                break
            parts[index].append(batch)
        states[index] = json.loads(json.dumps(reader.state()))
        reader.close()

    for count in (5, 3, None):
        threads = [threading.Thread(target=read, args=(index, count)) for index in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    found = list(zip(*parts, strict=True))
    assert [values(step) for step in found] == [values(step) for step in whole]


# Consumers that join a job: a run of their own, the current one, or a resumed one.

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


# Requests that wait for news.


class _Asked:
    """A request and its answers."""

    def __init__(self) -> None:
        self.answers: list[Message] = []
        self.request = Request(Message("ask"), self.answers.append)

    @property
    def kinds(self) -> list[str]:
        return [answer.kind for answer in self.answers]


def test_requests_are_answered_at_once_later_or_not_in_vain() -> None:
    parked, news = ParkedRequests(), []
    at_once, later, in_vain = _Asked(), _Asked(), _Asked()
    parked.answer_when(at_once.request, lambda: Message("now"), otherwise=Message("no"), limit_s=9)

    def find() -> Message | None:
        return Message("news") if news else None

    parked.answer_when(later.request, find, otherwise=Message("no"), limit_s=99, tag=("run", 3))
    parked.answer_when(in_vain.request, lambda: None, otherwise=Message("no"), limit_s=0)
    assert parked.wanted_of("run") == [3]
    assert parked.wanted_of("other") == []
    parked.look_again()
    assert (at_once.kinds, later.kinds, in_vain.kinds) == (["now"], [], ["no"])
    news.append(1)
    parked.look_again()
    parked.look_again()
    assert later.kinds == ["news"]
    assert parked.wanted_of("run") == []


@pytest.mark.parametrize("limit_s", [0, 99])
def test_an_error_is_the_answer_of_its_request_alone(limit_s) -> None:
    parked, failed, other = ParkedRequests(), _Asked(), _Asked()
    results: list[Message | None] = [None]

    def find() -> Message | None:
        return results.pop()  # the second time, it raises IndexError

    parked.answer_when(failed.request, find, otherwise=Message("no"), limit_s=limit_s)
    parked.answer_when(other.request, lambda: None, otherwise=Message("no"), limit_s=0)
    parked.look_again()
    assert (failed.kinds, other.kinds) == (["error"], ["no"])


# Workers and consumers that a dispatcher has heard of.


def test_silent_workers_are_found_and_never_come_back() -> None:
    members = Members(None)
    assert members.hear_worker("a", "tcp://h:1", [], 0.0) == []
    members.hear_worker("b", "tcp://h:2", ["gpu"], 1.0)
    members.hear_worker("a", "tcp://h:1", [], 2.0)
    assert members.silent_workers(1.5) == ["b"]
    members.remove_worker("b")
    assert set(members.workers) == {"a"}
    assert members.lost == {"b"}
    assert members.num_listed is None
    assert members.reserved_for_others("a", may_wait=True) == set()


def test_a_worker_takes_the_address_of_its_former_self() -> None:
    members = Members(["h:1", "h:2"])
    members.hear_worker("a", "tcp://h:1", [], 0.0)
    assert members.hear_worker("again", "tcp://h:1", [], 1.0) == ["a"]
    members.remove_worker("a")
    assert members.workers["again"].index == 0


@pytest.mark.parametrize("listed", [["h:1", "g:2"], ["h", "g"], ["tcp://h:%port%", "g:%port%"]])
def test_listed_workers_have_splits_of_their_own(listed) -> None:
    members = Members(listed)
    members.hear_worker("g", "tcp://g:2", [], 0.0)
    assert members.workers["g"].index == 1
    assert members.num_listed == 2
    assert members.reserved_for_others("g", may_wait=True) == {0}
    assert members.reserved_for_others("g", may_wait=False) == set()
    members.hear_worker("h", "tcp://h:1", [], 0.0)
    assert members.reserved_for_others("g", may_wait=False) == {0}
    with pytest.raises(ValueError, match="A worker at h:7 asked to join"):
        members.hear_worker("more", "tcp://h:7", [], 0.0)


# States of several consumers become the state of their job.


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


# Description of a dispatcher's workers and jobs.


def test_nothing_is_described_without_workers_and_jobs() -> None:
    assert describe(Members(None), []) == {"workers": {}, "jobs": []}


@pytest.mark.slow
def test_workers_and_jobs_are_described_while_one_reads() -> None:
    with sg.input.service.start(1) as service:
        distribute = sg.input.service.distribute("distributed_epoch", service.target)
        dataset = sg.input.Dataset(np.arange(6), batch_size=2).apply(distribute)
        batches = iter(dataset)
        next(batches)
        (job,) = service.describe()["jobs"]
        assert (job["policy"], job["num_consumers"], job["is_finished"]) == ("DYNAMIC", 1, False)
        assert len([*batches]) == 2
        (worker,) = service.describe()["workers"].values()
        assert worker.keys() == {"tags", "num_read", "read_s"}
