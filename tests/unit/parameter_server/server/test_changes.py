"""Requests that change something, sent more than once."""

from __future__ import annotations

import json

from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server import changes
from stratagem.parameter_server.server.changes import Change, Changes


class Asked:
    """A request, and what was answered to it."""

    def __init__(self, client: str, number: int) -> None:
        self.answers: list[Message] = []
        fields = {"client": client, "number": number}
        self.request = Request(Message("x", fields), self.answers.append)

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


def test_who_asks_again_meanwhile_is_answered_when_the_first_is() -> None:
    owner, first, again = make(), Asked("a", 1), Asked("a", 1)
    change = begin(owner, first)
    assert owner.begin(again.request) is None
    assert again.told == []
    change.done(told="one")
    assert (first.told, again.told) == (["one"], ["one"])


def test_what_failed_is_reported_and_tried_again() -> None:
    owner, first, meanwhile, again = make(), Asked("a", 1), Asked("a", 1), Asked("a", 1)
    change = begin(owner, first)
    assert owner.begin(meanwhile.request) is None
    change.fail(KeyError("v"))
    assert (first.told, meanwhile.told) == (["KeyError"], ["KeyError"])
    begin(owner, again).done(told="one")
    assert again.told == ["one"]


def test_next_change_of_a_client_that_has_given_up_the_first_is_not_held_up() -> None:
    owner, first, second, third = make(), Asked("a", 1), Asked("a", 2), Asked("a", 2)
    slow = begin(owner, first)
    begin(owner, second).done(told="two")
    slow.done(told="one")
    assert owner.begin(third.request) is None
    assert third.told == ["two"]


def test_answer_that_cannot_be_made_is_reported() -> None:
    def answer(message: Message, outcome: object) -> Message:
        raise KeyError("v")

    owner = Changes(answer)
    asked = Asked("a", 1)
    begin(owner, asked).done(told="one")
    assert asked.told == ["KeyError"]


def test_last_changes_are_known_after_a_restart() -> None:
    owner, after = make(), make()
    for number in (1, 2):
        begin(owner, Asked("a", number)).done(told=str(number))
    begin(owner, Asked("b", 7)).done(told="seven")
    begin(owner, Asked("c", 1))  # under way
    assert owner.saved()["clients"] == [
        ["a", 2, {"told": "2"}, {}],
        ["b", 7, {"told": "seven"}, {}],
    ]
    after.restore(owner.saved())
    again = Asked("a", 2)
    assert after.begin(again.request) is None
    assert again.told == ["2"]
    begin(after, Asked("a", 3))
    begin(after, Asked("c", 1))


def test_clients_that_asked_longest_ago_are_forgotten(monkeypatch) -> None:
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
        super().__init__(client, number)
        fields = {
            "client": client,
            "number": number,
            "function": function,
            "place": place,
            "sign": 1,
            "order": order,
            "first_open": first_open,
        }
        if is_rerun:
            fields["is_rerun"] = True
        self.request = Request(Message("assign", fields), self.answers.append)

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


def test_updates_of_a_function_that_runs_again_elsewhere_are_made_once() -> None:
    owner = make()
    for number in (1, 2):
        handle(owner, OfFunction("killed", number, number))
    for one in (owner, restarted(owner)):
        for place in (1, 2):
            again = OfFunction("other", place + 10, place, is_rerun=True)
            assert handle(one, again).is_repeated
        handle(one, OfFunction("other", 13, 3, is_rerun=True))  # the first had not made it
        assert one.counts.applied == {"assign_add": 3}
        assert one.counts.repeated == {"assign_add": 2}


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


def test_silent_worker_that_went_on_does_not_make_its_functions_again() -> None:
    """It has two functions when it is given up, ends both, and gets both again."""
    owner = make()
    handle(owner, OfFunction("silent", 1, 1, function="f"))
    handle(owner, OfFunction("silent", 2, 1, function="g"))
    for one in (restarted(owner), owner):
        for number, function in enumerate("fg", 3):
            again = OfFunction("silent", number, 1, function=function, is_rerun=True)
            assert handle(one, again).is_repeated


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


def test_functions_of_a_former_coordinator_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(changes, "_MOST_FUNCTIONS", 3)
    owner = make()
    handle(owner, OfFunction("a", 1, 1, function="former", order=1000))
    for order in range(4):
        function = f"{order}"
        handle(
            owner, OfFunction("a", order + 2, 1, function=function, order=order, first_open=order)
        )
    assert list(owner._clients["a"].functions) == ["3"]


def test_update_that_the_first_run_is_just_making_is_not_made_by_the_second() -> None:
    owner, first = make(), OfFunction("killed", 1, 1)
    second = OfFunction("other", 1, 1, is_rerun=True)
    making, waiting = begin(owner, first), begin(owner, second)
    assert not making.answer_repeated()
    making.done()
    assert waiting.answer_repeated()
    assert second.is_repeated


def test_functions_that_ran_again_longest_ago_are_forgotten(monkeypatch) -> None:
    monkeypatch.setattr(changes, "_MOST_RERUNS", 2)
    owner = make()
    for number in range(4):
        handle(owner, OfFunction("a", number + 1, 1, function=f"{number}", is_rerun=True))
    assert owner.saved()["reruns"] == {"2": 1, "3": 1}


def test_updates_of_a_function_that_runs_for_the_first_time_are_all_made() -> None:
    owner = make()
    begin(owner, OfFunction("a", 1, 1)).done()
    begin(owner, OfFunction("b", 1, 1)).done()
    assert owner.counts.applied == {"assign_add": 2}


def test_update_that_was_discarded_or_failed_is_made_when_the_function_runs_again() -> None:
    owner = make()
    begin(owner, OfFunction("a", 1, 1)).done(is_used=False)
    begin(owner, OfFunction("b", 1, 1, is_rerun=True)).fail(KeyError("v"))
    handle(owner, OfFunction("c", 1, 1, is_rerun=True))
    assert owner.counts.applied == {"assign_add": 1}
    assert owner.counts.repeated == {}


def test_requests_that_are_sent_again_are_counted() -> None:
    owner, first = make(), OfFunction("a", 1, 1)
    change = begin(owner, first)
    assert owner.begin(OfFunction("a", 1, 1).request) is None  # meanwhile
    change.done()
    assert owner.begin(OfFunction("a", 1, 1).request) is None
    assert (owner.counts.applied, owner.counts.resent) == ({"assign_add": 1}, {"assign_add": 2})


def test_clients_whose_changes_fail_are_not_remembered() -> None:
    owner = make()
    for number in range(1000):
        begin(owner, Asked(f"client {number}", 1)).fail(KeyError("v"))
    assert owner._clients == {}


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
