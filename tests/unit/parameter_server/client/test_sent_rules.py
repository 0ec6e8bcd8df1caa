"""Optimizers that are sent again to servers that restarted."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stratagem.errors import UnavailableError
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import NeededRules, SentRules


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
