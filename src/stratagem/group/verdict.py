"""Failure detection from the last known state of all members, without side effects."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence

from stratagem.errors import DeadlineExceededError, UnavailableError, explain


@dataclasses.dataclass(frozen=True)
class GroupLimits:
    """Time limits of a group, in seconds.

    `join_s`: until all processes have joined. `peer_s`: between two heartbeats of a process.
    `stuck_s`: without progress while others wait. `barrier_s`: until all have joined an exchange.
    """

    join_s: float = 300.0
    peer_s: float = 30.0
    stuck_s: float = 120.0
    barrier_s: float = 300.0


class Activity(enum.StrEnum):
    """Current activity of a process.

    COMPILE may take long. STEP waits for a program that all processes run, EXCHANGE for the others
    in a named call, AGREEMENT for the progress of others, which may wait for this process in turn,
    INPUT for batches, whose sizes are exchanged, EXIT for the others to end.
    """

    PYTHON = "python"
    COMPILE = "compile"
    STEP = "step"
    EXCHANGE = "exchange"
    AGREEMENT = "agreement"
    INPUT = "input"
    EXIT = "exit"


@dataclasses.dataclass(frozen=True)
class ProgramPosition:
    """Position of a process in its program.

    `step` counts shared programs: calls of compiled functions that all processes run, such as one
    training step or many, an evaluation, a reduction. It is not an optimizer's count, so messages
    say "shared program". `moves` counts position changes: equal positions in a loop differ in it.
    `calls` counts shared calls: programs and exchanges.
    """

    kind: Activity = Activity.PYTHON
    name: str = ""
    step: int = 0
    moves: int = 0
    calls: int = 0

    def __str__(self) -> str:
        after = f"after shared program {self.step}" if self.step else "before any shared program"
        if self.kind is Activity.STEP:
            return f"in shared program {self.step} ({self.name})"
        if self.kind is Activity.EXCHANGE:
            return f"at {self.name!r} {after}"
        if self.kind is Activity.AGREEMENT:
            return f"agreeing on {self.name} {after}"
        if self.kind is Activity.INPUT:
            return f"waiting for a batch of {self.name} {after}"
        if self.kind is Activity.EXIT:
            return f"at its end {after}"
        return f"{'compiling' if self.kind is Activity.COMPILE else 'in your code'} {after}"


@dataclasses.dataclass(frozen=True)
class MemberView:
    """Last known state of one process.

    `silent_s` is the time since its last heartbeat, `unmoved_s` since its last change of position.
    `error_text` is set once an error has ended it, `has_left` once it has ended normally.
    """

    label: str
    position: ProgramPosition = ProgramPosition()
    silent_s: float = 0.0
    unmoved_s: float = 0.0
    is_connected: bool = True
    error_text: str | None = None
    has_left: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loss:
    """Loss of a task as another one reports it: the record for the launcher and the run's events.

    `task` is its name there, such as "worker 2", and `how` continues a sentence about it, such as
    "died". `step` counts the shared programs that it had begun, if known. `reported_by` is the task
    that raises the error, whose text begins with `message`.
    """

    task: str
    how: str
    step: int | None
    reported_by: str
    message: str

    def to_json(self) -> str:
        """Returns the record as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Loss | None:
        """Returns the record in a text; None if it is incomplete."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Reason why a group cannot continue.

    `error` is the name of the exception class that every process raises. `lost` is the label of the
    lost or stuck process, if any, `silent_s` the time since its last heartbeat, if known, and `how`
    and `step` are as in `Loss`.
    """

    error: str
    message: str
    lost: str | None = None
    silent_s: float | None = None
    how: str = ""
    step: int | None = None

    def loss(self, reporter: str) -> Loss | None:
        """Returns the record of the process labeled `reporter`; None if no process is lost."""
        if self.lost is None:
            return None
        return Loss(
            task=_task_of(self.lost),
            how=self.how,
            step=self.step,
            reported_by=_task_of(reporter),
            message=self.message,
        )

    def exception(self) -> Exception:
        """Returns the exception to raise."""
        classes: dict[str, type[Exception]] = {
            "UnavailableError": UnavailableError,
            "DeadlineExceededError": DeadlineExceededError,
            "ValueError": ValueError,
        }
        return classes.get(self.error, RuntimeError)(self.message)


def _task_of(label: str) -> str:
    """Returns the name of a process's task for launchers and events, without its address."""
    name = label.partition(" (")[0]
    # Workers of several nodes know only their numbers as processes, which are those of the workers.
    return "chief 0" if name == "chief" else name.replace("process", "worker")


_WAITING = (Activity.STEP, Activity.EXCHANGE, Activity.INPUT, Activity.EXIT)
# Positions arrive with heartbeats, so matching positions may appear some time apart.
_SETTLED_S = 3.0
# The position of a process that missed some heartbeats may be outdated.
_FRESH_S = 2.5
_MAX_NAMED = 64


def judge(members: Sequence[MemberView], limits: GroupLimits) -> Verdict | None:
    """Returns the reason why the members cannot continue, or None if they can."""
    for member in members:
        verdict = _find_lost(member, members, limits)
        if verdict is not None:
            return verdict
    return _find_mismatch(members) or _find_stuck(members, limits)


def named(names: Sequence[str], separator: str = ", ") -> str:
    """Joins names or sentences; names only some of very many, because messages go to all."""
    left_out = len(names) - _MAX_NAMED
    if left_out <= 0:
        return separator.join(names)
    return f"{separator.join(names[:_MAX_NAMED])} and {left_out} more"


def _others(member: MemberView, members: Sequence[MemberView]) -> str:
    """Describes the positions of the other processes, silent ones among them."""
    others = sorted((m for m in members if m is not member), key=_is_fresh)
    return named(
        [
            f"{m.label} is {m.position}."
            if _is_fresh(m)
            else f"{m.label} was {m.position}, and has not answered for {m.silent_s:.0f} s either."
            for m in others
        ],
        separator=" ",
    )


def _find_lost(
    member: MemberView, members: Sequence[MemberView], limits: GroupLimits
) -> Verdict | None:
    if member.error_text is not None:
        how = "ended with an error"
        message = explain(
            f"{member.label} {how} {member.position}:\n{member.error_text}",
            expected="all processes to keep running.",
            fix="fix that error, then restart all processes.",
            code="SG506",
        )
    elif member.has_left:
        return None
    elif not member.is_connected:
        how = "died"
        message = explain(
            f"{member.label} {how} {member.position}: its connection closed. "
            f"{_others(member, members)}",
            expected="all processes to keep running.",
            fix="check its log for the reason (killed, out of memory, preempted), then "
            "restart all processes.",
            code="SG506",
        )
    elif member.silent_s > limits.peer_s:
        how = f"has not answered for {member.silent_s:.0f} s"
        message = explain(
            f"{member.label} {how}; it was last {member.position}. {_others(member, members)}",
            expected=f"a heartbeat at least every {limits.peer_s:g} s (STRATAGEM_PEER_TIMEOUT_S).",
            fix="check whether it is stopped or its network is down, then restart all processes.",
            code="SG506",
        )
    else:
        return None
    return Verdict(
        "UnavailableError",
        message,
        lost=member.label,
        silent_s=member.silent_s,
        how=how,
        step=_step(member),
    )


def _find_mismatch(members: Sequence[MemberView]) -> Verdict | None:
    """Finds processes that wait for each other at different calls."""
    settled = [m for m in members if m.unmoved_s >= _SETTLED_S and _is_fresh(m)]
    by_kind: dict[Activity, list[MemberView]] = {}
    for member in settled:
        by_kind.setdefault(member.position.kind, []).append(member)
    in_step = by_kind.get(Activity.STEP, [])
    elsewhere = [*by_kind.get(Activity.EXCHANGE, []), *by_kind.get(Activity.EXIT, [])]
    behind = min(elsewhere, key=_step, default=None)
    first_in: dict[int, MemberView] = {}
    for waiting in in_step:
        if behind is not None and _step(behind) < _step(waiting):
            return _mismatch_verdict(waiting, behind)
        first = first_in.setdefault(_step(waiting), waiting)
        if first.position.name != waiting.position.name:
            return _mismatch_verdict(first, waiting)
    waiting = [*by_kind.get(Activity.EXCHANGE, []), *by_kind.get(Activity.INPUT, [])]
    if waiting and (ended := by_kind.get(Activity.EXIT)):
        return _mismatch_verdict(waiting[0], ended[0])
    return None


def _step(member: MemberView) -> int:
    return member.position.step


def _is_fresh(member: MemberView) -> bool:
    return member.has_left or member.silent_s <= _FRESH_S


def _mismatch_verdict(waiting: MemberView, member: MemberView) -> Verdict:
    left = member.position.kind is Activity.EXIT
    return Verdict(
        "UnavailableError" if left else "RuntimeError",
        explain(
            f"{member.label} {'left early' if left else 'is out of step'}: it is "
            f"{member.position}, "
            f"while {waiting.label} is {waiting.position} and waits for it.",
            expected="the same steps in the same order on every process.",
            fix="find where their programs differ: another number of batches, a loop or a "
            "condition on the process, a call that only the chief makes.",
            code="SG507",
        ),
    )


def _find_stuck(members: Sequence[MemberView], limits: GroupLimits) -> Verdict | None:
    waiting = [m for m in members if m.position.kind in _WAITING and m.unmoved_s > limits.stuck_s]
    busy = [
        m
        for m in members
        if m.position.kind is Activity.PYTHON and m.unmoved_s > limits.stuck_s and _is_fresh(m)
    ]
    if not waiting or not busy or all(m.position.kind is Activity.EXIT for m in waiting):
        return None
    member = max(busy, key=lambda m: m.unmoved_s)
    how = f"has made no progress for {member.unmoved_s:.0f} s"
    return Verdict(
        "DeadlineExceededError",
        explain(
            f"{member.label} {how}: it is {member.position}. {_others(member, members)}",
            expected=f"the next step within {limits.stuck_s:g} s (STRATAGEM_STUCK_TIMEOUT_S) "
            "while others wait for it.",
            fix="check what it is doing (its log, `py-spy dump`), or raise the variable if it may "
            "take that long.",
            code="SG508",
        ),
        lost=member.label,
        silent_s=member.unmoved_s,
        how=how,
        step=_step(member),
    )
