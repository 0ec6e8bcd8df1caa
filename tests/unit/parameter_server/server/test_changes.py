"""Requests that change something, sent more than once."""

from __future__ import annotations

import json
import threading
from collections import Counter

from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server import changes
from stratagem.parameter_server.server.changes import (
    Change,
    Changes,
    Lifetime,
    SeenVersions,
    by_kind,
)


class Asked:
    """A request, and what was answered to it."""

    def __init__(self, client: str, number: int, kind: str = "x", **fields: object) -> None:
        self.answers: list[Message] = []
        fields = {"client": client, "number": number, **fields}
        self.request = Request(Message(kind, fields), self.answers.append)

    @property
    def told(self) -> list:
        return [answer.fields.get("told", answer.fields.get("type")) for answer in self.answers]


def make() -> Changes:
    return Changes(lambda message, outcome: Message("ok", dict(outcome)))


def begin(owner: Changes, asked: Asked) -> Change:
    change = owner.begin(asked.request)
    assert change is not None
    return change


def test_change_that_is_asked_for_again_is_answered_and_not_carried_out() -> None:
    owner, first, again = make(), Asked("a", 1), Asked("a", 1)
    begin(owner, first).done(told="one")
    assert owner.begin(again.request) is None
    assert (first.told, again.told) == (["one"], ["one"])
    begin(owner, Asked("b", 1)).done(told="other client")
    begin(owner, Asked("a", 2)).done(told="two")
    assert owner.num_done == 3
    update, again = OfFunction("a", 3, 1), OfFunction("a", 3, 1)
    change = begin(owner, update)
    assert owner.begin(again.request) is None
    change.done()
    assert owner.counts.applied == {"assign_add": 1}
    assert owner.counts.resent["assign_add"] == 1


def test_what_failed_is_reported_and_tried_again() -> None:
    owner, first, meanwhile, again = make(), Asked("a", 1), Asked("a", 1), Asked("a", 1)
    change = begin(owner, first)
    assert owner.begin(meanwhile.request) is None
    change.fail(KeyError("v"))
    assert (first.told, meanwhile.told) == (["KeyError"], ["KeyError"])
    begin(owner, again).done(told="one")
    assert again.told == ["one"]

    def answer(message: Message, outcome: object) -> Message:
        raise KeyError("v")

    unanswered = Asked("a", 1)
    begin(Changes(answer), unanswered).done(told="one")
    assert unanswered.told == ["KeyError"]


def test_next_change_of_a_client_that_has_given_up_the_first_is_not_held_up() -> None:
    owner, first, second, third = make(), Asked("a", 1), Asked("a", 2), Asked("a", 2)
    slow = begin(owner, first)
    begin(owner, second).done(told="two")
    slow.done(told="one")
    assert owner.begin(third.request) is None
    assert third.told == ["two"]


def test_clients_that_asked_longest_ago_or_whose_changes_failed_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(changes, "_MOST_CLIENTS", 3)
    owner = make()
    waiting = begin(owner, Asked("waits", 1))
    for client in "abcade":
        begin(owner, Asked(client, owner.num_done + 1)).done()
    assert [name for name, *_ in owner.saved()["clients"]] == ["d", "e"]
    waiting.done(told="late")
    again = Asked("waits", 1)
    assert owner.begin(again.request) is None
    assert again.told == ["late"]
    owner = make()
    for number in range(1000):
        begin(owner, Asked(f"client {number}", 1)).fail(KeyError("v"))
    assert owner._clients == {}


def test_answer_that_cannot_be_sent_to_one_is_sent_to_the_others() -> None:
    owner, asked, again = make(), Asked("a", 1), Asked("a", 1)
    errors = [MemoryError()]

    def send(message: Message) -> None:
        if errors:
            raise errors.pop()
        asked.answers.append(message)

    failing = Request(asked.request.message, send)
    change = owner.begin(failing)
    assert change is not None
    assert owner.begin(again.request) is None
    change.done(told="one")
    assert (asked.told, again.told) == (["MemoryError"], ["MemoryError"])
    later = Asked("a", 1)
    assert owner.begin(later.request) is None  # it was made, and is not made again
    assert later.told == ["one"]


class OfFunction(Asked):
    """An update at a place of a function."""

    def __init__(
        self,
        client: str,
        number: int,
        place: int,
        *,
        function: str = "f",
        is_rerun: bool = False,
        order: int = 0,
        first_open: int = 0,
    ) -> None:
        own = {"function": function, "place": place, "is_rerun": is_rerun}
        super().__init__(
            client, number, "assign", **own, sign=1, order=order, first_open=first_open
        )

    @property
    def is_repeated(self) -> bool:
        return self.answers[0].fields == {"is_used": True, "is_repeated": True}


def handle(owner: Changes, asked: OfFunction) -> OfFunction:
    """Makes an update as a server does, unless another run of its function has made it."""
    change = begin(owner, asked)
    if not change.answer_repeated():
        change.done()
    return asked


def restarted(owner: Changes) -> Changes:
    after = make()
    after.restore(json.loads(json.dumps(owner.saved())))
    after.counts.restore(owner.counts.saved())
    return after


def test_worker_that_was_only_silent_does_not_repeat_the_updates_of_the_second_run() -> None:
    owner = make()
    handle(owner, OfFunction("silent", 1, 1))
    assert handle(owner, OfFunction("other", 1, 1, is_rerun=True)).is_repeated
    handle(owner, OfFunction("other", 2, 2, is_rerun=True))
    for number in range(3, 10):  # the second run is over, and others follow
        handle(owner, OfFunction("other", number, 1, function=f"g{number}"))
    for one in (restarted(owner), owner):
        assert handle(one, OfFunction("silent", 2, 2)).is_repeated
        assert not handle(one, OfFunction("silent", 3, 3)).is_repeated
        assert handle(one, OfFunction("third", 1, 3, is_rerun=True)).is_repeated


def test_function_is_remembered_until_its_message_is_closed() -> None:
    """A worker may run many functions while the answer to an earlier one is lost."""
    owner = make()
    for order in range(100):
        handle(owner, OfFunction("a", order + 1, 1, function=f"{order}", order=order))
    assert handle(restarted(owner), OfFunction("b", 1, 1, function="0", is_rerun=True)).is_repeated
    handle(owner, OfFunction("a", 101, 1, function="100", order=100, first_open=98))
    assert list(owner._clients["a"].functions) == ["98", "99", "100"]
    assert not handle(owner, OfFunction("b", 1, 1, function="0", is_rerun=True)).is_repeated
    assert handle(owner, OfFunction("b", 2, 1, function="98", is_rerun=True)).is_repeated


def test_functions_of_a_former_coordinator_and_old_reruns_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(changes, "_MOST_FUNCTIONS", 3)
    owner = make()
    handle(owner, OfFunction("a", 1, 1, function="former", order=1000))
    for order in range(4):
        function = f"{order}"
        handle(
            owner, OfFunction("a", order + 2, 1, function=function, order=order, first_open=order)
        )
    assert list(owner._clients["a"].functions) == ["3"]
    monkeypatch.setattr(changes, "_MOST_RERUNS", 2)
    owner = make()
    for number in range(4):
        handle(owner, OfFunction("a", number + 1, 1, function=f"{number}", is_rerun=True))
    assert owner.saved()["reruns"] == {"2": 1, "3": 1}


def test_update_that_the_first_run_is_just_making_is_not_made_by_the_second() -> None:
    owner, first = make(), OfFunction("killed", 1, 1)
    second = OfFunction("other", 1, 1, is_rerun=True)
    making, waiting = begin(owner, first), begin(owner, second)
    assert not making.answer_repeated()
    making.done()
    assert waiting.answer_repeated()
    assert second.is_repeated


def test_update_that_was_discarded_or_failed_is_made_when_the_function_runs_again() -> None:
    owner = make()
    begin(owner, OfFunction("a", 1, 1)).done(is_used=False)
    begin(owner, OfFunction("b", 1, 1, is_rerun=True)).fail(KeyError("v"))
    handle(owner, OfFunction("c", 1, 1, is_rerun=True))
    assert owner.counts.applied == {"assign_add": 1}
    assert owner.counts.repeated == {}


def test_answers_are_held_until_the_changes_are_in_the_journal() -> None:
    owner, held = make(), []
    owner.hold = lambda requests, answer: held.append((list(requests), answer))
    first, again = OfFunction("a", 1, 1), OfFunction("b", 1, 1, is_rerun=True)
    begin(owner, first).done(told="one")
    assert begin(owner, again).answer_repeated()
    assert (first.answers, again.answers) == ([], [])
    for requests, answer in held:
        for request in requests:
            request.answer(answer)
    assert (len(first.answers), len(again.answers)) == (1, 1)


# Numbers of updates, of servers that are started again.

FIRST, SECOND = Lifetime(10), Lifetime(20, restored_version=5)


def answer(lifetime: Lifetime, version: int, *applied: int) -> Message:
    return Message("ok", lifetime.fields(version, [*(applied or (0, 0, 0, 0)), version]))


def test_values_of_a_former_run_are_as_old_as_what_was_restored() -> None:
    assert SECOND.version_of({"version": 7, "lifetime": 20}) == 7
    assert SECOND.version_of({"version": 7, "lifetime": 10}) == 5
    assert SECOND.version_of({"version": 3, "lifetime": 10}) == 3
    assert FIRST.version_of({"version": 7, "lifetime": 9}) == 0


def test_lost_updates_are_counted_once_whoever_sees_it_and_in_whatever_order() -> None:
    seen = SeenVersions()
    seen.note(0, answer(FIRST, 8))
    seen.note(0, answer(FIRST, 6))  # of another thread, which came later
    assert by_kind(seen.losses).total() == 0
    seen.note(0, answer(SECOND, 6))
    assert by_kind(seen.losses).total() == 3
    seen.note(0, answer(FIRST, 9))  # late: no second restart, but one more update
    thread = threading.Thread(target=seen.note, args=(0, answer(SECOND, 7)))
    thread.start()
    thread.join()
    seen.note(1, answer(SECOND, 6))  # first seen now
    assert by_kind(seen.losses).total() == 4
    seen.note(0, answer(Lifetime(30, 7), 7))  # an orderly end
    assert by_kind(seen.losses).total() == 4
    seen.note(0, answer(Lifetime(40), 0))  # without a journal
    assert by_kind(seen.losses).total() == 11
    assert by_kind(seen.losses) == {"push": 11}


def test_clients_that_each_saw_the_last_update_of_one_run_lose_none_of_them() -> None:
    """One client saw the last update before the first restart, the other before the second."""
    runs = [FIRST, SECOND, Lifetime(30, restored_version=9)]
    seen = {client: SeenVersions() for client in "ab"}
    for client, versions in {"a": (8, 20, 9), "b": (7, 21, 9)}.items():
        for run, version in zip(runs, versions, strict=True):
            seen[client].note(0, answer(run, version))
    losses = Counter(seen["a"].losses) | Counter(seen["b"].losses)
    assert losses == {"0/10/push": 8 - 5, "0/20/push": 21 - 9}
    assert by_kind(losses) == {"push": 15}  # the larger of the clients' sums is 14


def test_lost_updates_of_all_kinds_are_counted_each_on_its_own() -> None:
    seen = SeenVersions()
    seen.note(0, answer(FIRST, 1, 4, 30, 2, 0))
    seen.note(0, answer(FIRST, 2, 4, 29, 2, 1))  # of another thread, which came later
    restored = Lifetime(20, restored_version=2, restored_applied=(5, 20, 1, 0, 2))
    for _ in range(2):
        seen.note(0, answer(restored, 2, 5, 20, 1, 0))
    assert by_kind(seen.losses) == {"assign_add": 10, "scatter": 1, "scatter_add": 1}
    assert by_kind(seen.losses).total() == 12


def test_oldest_value_that_a_gradient_was_computed_from_counts() -> None:
    seen = SeenVersions()
    assert seen.of(0, ["v"]) == {"lifetime": 0, "version": 0}
    seen.note(0, answer(FIRST, 3), ["v", "w"])
    seen.note(0, answer(FIRST, 4), ["table"])
    seen.note(1, answer(FIRST, 9), ["v"])
    assert seen.of(0, ["v", "table"]) == {"lifetime": 10, "version": 3}
    assert seen.of(0, ["table"]) == {"lifetime": 10, "version": 4}
    assert seen.of(0, ["never pulled"]) == {"lifetime": 10, "version": 4}
    seen.note(0, answer(SECOND, 5), ["v"])
    assert seen.of(0, ["v", "w"]) == {"lifetime": 10, "version": 3}
    assert seen.of(0, ["v"]) == {"lifetime": 20, "version": 5}
