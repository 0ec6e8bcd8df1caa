"""Requests that wait for news."""

from __future__ import annotations

import pytest

from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.input.service.dispatching import ParkedRequests


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
