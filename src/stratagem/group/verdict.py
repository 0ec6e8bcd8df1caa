"""Whether a group can go on, judged from what its members last said: no effects, no clocks."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.messages import explain

__all__ = ["Kind", "Limits", "MemberView", "Place", "Verdict", "judge"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long a group waits, in seconds.

    Args:
        join_s: for all processes to come together.
        peer_s: for a sign of life of a process.
        stuck_s: for a process that lives and makes no progress while others wait for it.
        barrier_s: for all processes to arrive at one place.
    """

    join_s: float = 300.0
    peer_s: float = 30.0
    stuck_s: float = 120.0
    barrier_s: float = 300.0


class Kind(enum.StrEnum):
    """What a process is doing.

    PYTHON: the user's code. COMPILE: making a program, which may take long. STEP: waits for a
    program that all run together. EXCHANGE: waits for the others at a named place. AGREEMENT: waits
    to be told how far they are; one that is further may be waiting for this one. INPUT: waits for
    batches, whose sizes processes tell each other. EXIT: has ended, and waits for the others to.
    """

    PYTHON = "python"
    COMPILE = "compile"
    STEP = "step"
    EXCHANGE = "exchange"
    AGREEMENT = "agreement"
    INPUT = "input"
    EXIT = "exit"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process is.

    Args:
        kind: what it does there.
        name: of the program, or of what it exchanges.
        step: the number of shared programs that it has begun. One is a call of a compiled function
            that all processes run: of one training step or of many, an evaluation, a reduction.
            So it is no count of an optimizer, and messages call it "shared program".
        moves: how often it has changed its place: two equal places in a loop are told apart.
    """

    kind: Kind = Kind.PYTHON
    name: str = ""
    step: int = 0
    moves: int = 0

    def __str__(self) -> str:
        after = f"after shared program {self.step}" if self.step else "before any shared program"
        if self.kind is Kind.STEP:
            return f"in shared program {self.step} ({self.name})"
        if self.kind is Kind.EXCHANGE:
            return f"at {self.name!r} {after}"
        if self.kind is Kind.AGREEMENT:
            return f"agreeing on {self.name} {after}"
        if self.kind is Kind.INPUT:
            return f"waiting for a batch of {self.name} {after}"
        if self.kind is Kind.EXIT:
            return f"at its end {after}"
        return f"{'compiling' if self.kind is Kind.COMPILE else 'in your code'} {after}"


@dataclasses.dataclass(frozen=True)
class MemberView:
    """What is known of one process.

    Args:
        label: its name in messages: `worker 2 (host:port)`.
        place: where it last was.
        silent_s: since its last sign of life.
        unmoved_s: since it came to this place.
        is_connected: whether its connection is open.
        parting: the last words of a process that ended with an error; None while it is there.
        has_left: whether it has ended, and said so.
    """

    label: str
    place: Place = Place()
    silent_s: float = 0.0
    unmoved_s: float = 0.0
    is_connected: bool = True
    parting: str | None = None
    has_left: bool = False


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Why a group cannot go on.

    Args:
        error: name of the class that every process raises.
        message: what it says.
        lost: name in messages of the process that is gone or stuck; None where there is no one.
        silent_s: since its last sign of life; None where that is not known.
    """

    error: str
    message: str
    lost: str | None = None
    silent_s: float | None = None

    def exception(self) -> Exception:
        """Returns the error to raise."""
        classes: dict[str, type[Exception]] = {
            "UnavailableError": UnavailableError,
            "DeadlineExceededError": DeadlineExceededError,
            "ValueError": ValueError,
        }
        return classes.get(self.error, RuntimeError)(self.message)


_WAITING = (Kind.STEP, Kind.EXCHANGE, Kind.INPUT, Kind.EXIT)
# A place is told once a beat, so that one of two that belong together is seen a little later.
_SETTLED_S = 3.0
# Of one that has been silent for longer than some beats nobody knows where it is by now.
_FRESH_S = 2.5


def judge(members: Sequence[MemberView], limits: Limits) -> Verdict | None:
    """Tells whether the members can go on together.

    Args:
        members: all processes, in their order.
        limits: how long anything may take.

    Returns:
        Why not; None if they can.
    """
    for member in members:
        verdict = _lost(member, members, limits)
        if verdict is not None:
            return verdict
    return _apart(members) or _stuck(members, limits)


def _others(member: MemberView, members: Sequence[MemberView]) -> str:
    """Where the others are, in sentences, and who of them is silent too."""
    return " ".join(
        f"{m.label} is {m.place}."
        if _is_fresh(m)
        else f"{m.label} was {m.place}, and has not answered for {m.silent_s:.0f} s either."
        for m in members
        if m is not member
    )


def _lost(member: MemberView, members: Sequence[MemberView], limits: Limits) -> Verdict | None:
    if member.parting is not None:
        return Verdict(
            "UnavailableError",
            explain(
                f"{member.label} ended with an error {member.place}:\n{member.parting}",
                expected="all processes to go on together.",
                fix="mend that error, and start all processes again.",
            ),
            lost=member.label,
            silent_s=member.silent_s,
        )
    if member.has_left:
        return None
    if not member.is_connected:
        return Verdict(
            "UnavailableError",
            explain(
                f"{member.label} died {member.place}: its connection broke off. "
                f"{_others(member, members)}",
                expected="all processes to go on together.",
                fix="look at its own log for the reason (killed, out of memory, preempted), and "
                "start all processes again.",
            ),
            lost=member.label,
            silent_s=member.silent_s,
        )
    if member.silent_s > limits.peer_s:
        return Verdict(
            "UnavailableError",
            explain(
                f"{member.label} has not answered for {member.silent_s:.0f} s; it was last "
                f"{member.place}. {_others(member, members)}",
                expected=f"a sign of life at least every {limits.peer_s:g} s "
                "(STRATAGEM_PEER_TIMEOUT_S).",
                fix="see whether it is stopped or its network is down, and start all processes "
                "again.",
            ),
            lost=member.label,
            silent_s=member.silent_s,
        )
    return None


def _apart(members: Sequence[MemberView]) -> Verdict | None:
    """Processes that wait for each other at places that cannot meet."""
    settled = [m for m in members if m.unmoved_s >= _SETTLED_S and _is_fresh(m)]
    in_step = [m for m in settled if m.place.kind is Kind.STEP]
    for waiting in in_step:
        for member in settled:
            elsewhere = member.place.kind in (Kind.EXCHANGE, Kind.EXIT)
            if elsewhere and member.place.step < waiting.place.step:
                return _out_of_step(waiting, member)
            if (
                member.place.kind is Kind.STEP
                and member.place.step == waiting.place.step
                and member.place.name != waiting.place.name
            ):
                return _out_of_step(waiting, member)
    for waiting in (m for m in settled if m.place.kind in (Kind.EXCHANGE, Kind.INPUT)):
        for member in settled:
            if member.place.kind is Kind.EXIT:
                return _out_of_step(waiting, member)
    return None


def _is_fresh(member: MemberView) -> bool:
    return member.has_left or member.silent_s <= _FRESH_S


def _out_of_step(waiting: MemberView, member: MemberView) -> Verdict:
    left = member.place.kind is Kind.EXIT
    return Verdict(
        "UnavailableError" if left else "RuntimeError",
        explain(
            f"{member.label} {'left early' if left else 'has come apart'}: it is {member.place}, "
            f"while {waiting.label} is {waiting.place} and waits for it.",
            expected="the same steps in the same order on every process.",
            fix="see where their programs part: another number of batches, a loop or a condition "
            "on the process, a call that only the chief makes.",
        ),
    )


def _stuck(members: Sequence[MemberView], limits: Limits) -> Verdict | None:
    waiting = [m for m in members if m.place.kind in _WAITING and m.unmoved_s > limits.stuck_s]
    busy = [
        m
        for m in members
        if m.place.kind is Kind.PYTHON and m.unmoved_s > limits.stuck_s and _is_fresh(m)
    ]
    if not waiting or not busy or all(m.place.kind is Kind.EXIT for m in waiting):
        return None
    member = max(busy, key=lambda m: m.unmoved_s)
    return Verdict(
        "DeadlineExceededError",
        explain(
            f"{member.label} has made no progress for {member.unmoved_s:.0f} s: it is "
            f"{member.place}. {_others(member, members)}",
            expected=f"the next step within {limits.stuck_s:g} s (STRATAGEM_STUCK_TIMEOUT_S) "
            "while others wait for it.",
            fix="see what it is doing (its log, `py-spy dump`), or set the variable higher if "
            "it may take so long.",
        ),
        lost=member.label,
        silent_s=member.unmoved_s,
    )
