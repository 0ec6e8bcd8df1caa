"""Order of a survey, and members that are silent or leave during it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from stratagem.cli.doctor.network import surveyor
from stratagem.cli.doctor.network.probes import Reason
from stratagem.cli.doctor.network.survey import Survey, SurveyedHost
from stratagem.cli.doctor.network.surveyor import Surveyor

_OFFSETS_S = [0.0, 5.0, -2.0]


class _Member:
    """A member with made-up measurements; `fails` maps an order to what happens instead."""

    def __init__(self, index: int, log: list[tuple[int, str]], fails: Mapping[str, Any]) -> None:
        self.free_port = 1000 + index
        self._index = index
        self._log = log
        self._fails = fails

    async def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        kind = order["kind"]
        self._log.append((self._index, kind))
        if isinstance(failure := self._fails.get(kind), BaseException):
            raise failure
        if failure == "silent":
            await asyncio.sleep(60)
        if failure is not None:
            return dict(failure)
        to = order.get("to", 0)
        tried = [(Reason.REACHED, f"10.0.0.{i}") if i != self._index else None for i in range(3)]
        return {
            "facts": {"facts": {"versions": {}}},
            "reach": {"reach": {"cluster": [None] * 3, "free": tried}},
            "owns": {"owns": {}, "own_address": "10.0.0.1"},
            "echo": {
                "round_trip_s": 1e-3,
                "offset_s": _OFFSETS_S[to] - _OFFSETS_S[self._index],
                "uncertainty_s": 5e-4,
            },
            "transfer": {"bytes_per_s": 100.0 + 10.0 * self._index + to},
        }[kind]

    async def end(self, report: Mapping[str, Any]) -> None:
        del report


def _survey(
    fails: Mapping[int, Mapping[str, Any]],
    transfer_s: float = 0.1,
    present: tuple[int, ...] = (0, 1, 2),
) -> tuple[Survey, list[tuple[int, str]]]:
    log: list[tuple[int, str]] = []
    survey = Survey([SurveyedHost(name, name) for name in "abc"])
    members = {index: _Member(index, log, fails.get(index, {})) for index in present}
    running = Surveyor(survey, members, limit_s=0.01, transfer_s=transfer_s, note=lambda text: None)
    return asyncio.run(running.run()), log


def test_pairs_are_measured_one_after_the_other() -> None:
    survey, log = _survey({})
    pairs = [entry for entry in log if entry[1] in ("echo", "transfer")]
    assert pairs == [
        (one, kind) for one in range(3) for _ in range(2) for kind in ("echo", "transfer")
    ]
    assert survey.bytes_per_s == [[None, 101.0, 102.0], [110.0, None, 112.0], [120.0, 121.0, None]]
    assert survey.offset_s == _OFFSETS_S
    assert survey.uncertainty_s == [0.0, 5e-4, 5e-4]
    assert survey.absent == {}


def test_no_transfer_is_made_if_none_is_wanted() -> None:
    survey, log = _survey({}, transfer_s=0.0)
    assert not any(kind == "transfer" for _, kind in log)
    assert survey.bytes_per_s == [[None] * 3] * 3


def test_clock_is_read_from_the_other_side_if_only_that_can_connect() -> None:
    tried = [None, (Reason.TIMEOUT, ""), (Reason.TIMEOUT, "")]
    reach = {"reach": {"cluster": [None] * 3, "free": tried}}
    survey, _ = _survey({0: {"reach": reach}})
    assert survey.offset_s == _OFFSETS_S
    assert survey.round_trip_s[0] == [None] * 3


def test_first_host_that_is_there_is_the_reference() -> None:
    survey, _ = _survey({}, present=(1, 2))
    assert survey.reference == 1
    assert survey.offset_s == [None, 0.0, -7.0]


@pytest.mark.parametrize("kind", ["facts", "reach", "echo", "transfer"])
@pytest.mark.parametrize("failure", ["silent", ConnectionError("closed by the other side")])
def test_member_that_is_lost_is_named_and_the_others_go_on(
    kind: str, failure: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(surveyor, "_SLACK_S", 0.05)
    monkeypatch.setattr(surveyor, "_FACTS_LIMIT_S", 0.05)
    survey, log = _survey({1: {kind: failure}}, transfer_s=0.01)
    assert list(survey.absent) == [1]
    assert survey.absent[1].startswith("stopped answering")
    assert repr(kind) in survey.absent[1]
    assert survey.bytes_per_s[2][0] == 120.0
    assert log[-1][0] == 2


def test_failed_measurement_is_recorded() -> None:
    survey, _ = _survey({0: {"transfer": {"error": "no answer"}}})
    assert survey.failures == [
        "transfer from a to b: no answer",
        "transfer from a to c: no answer",
    ]
    assert survey.bytes_per_s[0] == [None, None, None]
    assert survey.bytes_per_s[1][0] == 110.0


def test_slow_pair_is_measured_again_and_the_faster_one_counts() -> None:
    class Slow(dict[str, Any]):
        """Only the first transfer is slow."""

        def get(self, kind: str, default: object = None) -> Any:
            return {"bytes_per_s": 1.0} if kind == "transfer" and self.pop(kind, None) else None

    survey, log = _survey({0: Slow(transfer=True)})
    assert survey.bytes_per_s[0] == [None, 101.0, 102.0]
    assert [entry for entry in log if entry[1] == "transfer"][-1] == (0, "transfer")
    assert len([entry for entry in log if entry[1] == "transfer"]) == 7
