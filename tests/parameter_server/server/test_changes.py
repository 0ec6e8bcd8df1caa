"""Requests that change something, sent more than once."""

from __future__ import annotations

from stratagem.parameter_server.server import changes
from stratagem.parameter_server.server.changes import Change, Changes
from stratagem.parameter_server.transport.listener import Request
from stratagem.parameter_server.transport.wire import Message


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
    assert owner.done() == [["a", 2, {"told": "2"}], ["b", 7, {"told": "seven"}]]
    after.restore(owner.done())
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
    assert [name for name, _, _ in owner.done()] == ["d", "e"]
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
