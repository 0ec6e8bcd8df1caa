"""Hand-written runs: the events of each process, by second."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from stratagem.observe.events import (
    EndEvent,
    Event,
    FailureEvent,
    MembersEvent,
    MemoryEvent,
    NoticeEvent,
    ProcessEvents,
    ProgressEvent,
    RestartEvent,
    RestoredEvent,
    RunEvents,
    SaveEndedEvent,
    SaveStartedEvent,
    StartEvent,
    StepEvent,
    encode,
)
from stratagem.observe.goodput import Account, account_for

EPOCH_S = 1000.0


def at(second: float) -> dict[str, float]:
    """Only the start's clock counts, so the clocks of other events are wrong on purpose."""
    return {"time_s": 5.0, "monotonic_s": second}


def process(
    task: str, start_s: float, *events: Event | Iterable[Event], attempt: int = 0
) -> ProcessEvents:
    task_type, index = task.split()
    start = StartEvent(
        time_s=EPOCH_S + start_s,
        monotonic_s=start_s,
        task_type=task_type,
        task_index=int(index),
        attempt=attempt,
        num_processes=2,
        pid=1,
    )
    flat = [one for event in events for one in ([event] if isinstance(event, Event) else event)]
    ordered = (start, *sorted(flat, key=lambda event: event.monotonic_s))
    return ProcessEvents(start=start, events=ordered)


def run(*processes: ProcessEvents) -> RunEvents:
    return RunEvents(processes=tuple(sorted(processes, key=lambda one: one.start.time_s)))


def account_of(*processes: ProcessEvents) -> Account:
    return account_for(run(*processes))


def steps(
    begin_s: float,
    end_s: float,
    first: int,
    last: int,
    *,
    busy: float | None = None,
    keeping: float = 0.0,
    waited: float | None = None,
) -> StepEvent:
    """Steps `first` to `last`, both included."""
    return StepEvent(
        **at(end_s),
        step=last,
        num_steps=last - first + 1,
        duration_s=end_s - begin_s if busy is None else busy,
        elapsed_s=end_s - begin_s,
        keeping_s=keeping,
        waited_s=waited,
    )


def first_step(at_s: float, step: int) -> StepEvent:
    return steps(at_s - 0.5, at_s, step, step)


def save(
    begin_s: float,
    end_s: float,
    step: int,
    *,
    stall_s: float | None = None,
    failed: str | None = None,
) -> tuple[Event, Event]:
    """One that training waits for, unless `stall_s` says how little it did."""
    behind = stall_s is not None
    ended = SaveEndedEvent(
        **at(end_s),
        step=step,
        stall_s=end_s - begin_s if stall_s is None else stall_s,
        duration_s=end_s - begin_s,
        is_asynchronous=behind,
        failed=failed,
    )
    return SaveStartedEvent(**at(begin_s), step=step, is_asynchronous=behind), ended


def restored(at_s: float, step: int, source: str = "ckpt-1") -> RestoredEvent:
    return RestoredEvent(**at(at_s), step=step, source=source)


def failure(
    at_s: float,
    lost: str | None = None,
    *,
    silence_s: float | None = None,
    step: int | None = None,
    reported_by: str | None = None,
) -> FailureEvent:
    return FailureEvent(
        **at(at_s),
        reason="no sign of life",
        lost=lost,
        silence_s=silence_s,
        step=step,
        reported_by=reported_by,
    )


def restart(at_s: float, attempt: int) -> RestartEvent:
    return RestartEvent(**at(at_s), attempt=attempt, cause="worker 1 failed")


def notice(at_s: float) -> NoticeEvent:
    return NoticeEvent(**at(at_s), reason="SIGTERM")


def end(at_s: float, code: int = 0, reason: str | None = None) -> EndEvent:
    return EndEvent(**at(at_s), code=code, reason=reason)


def progress(
    at_s: float, step: int, total: int | None = None, **values: float | None
) -> ProgressEvent:
    return ProgressEvent(
        **at(at_s), step=step, total_steps=total, epoch=None, num_epochs=None, values=values
    )


def memory(at_s: float, host: int | None, device: int | None = None) -> MemoryEvent:
    limit = None if device is None else 1000
    return MemoryEvent(**at(at_s), host_bytes=host, device_bytes=device, device_limit_bytes=limit)


def members(
    at_s: float,
    view: int,
    num_members: int,
    *,
    lost: str = "",
    joined: str = "",
    pause_s: float | None = None,
    step_s: float | None = 0.5,
) -> MembersEvent:
    """A report at the end of the first step in a view; `lost` and `joined` are indices of workers.

    The pause ends `step_s` before it.
    """
    return MembersEvent(
        **at(at_s),
        view=view,
        lost=[f"worker {index}" for index in lost.split()],
        joined=[f"worker {index}" for index in joined.split()],
        num_members=num_members,
        num_expected=3,
        change_s=0.25,
        pause_s=pause_s,
        step_s=step_s,
    )


def straggling() -> RunEvents:
    """Worker 1 takes 0.3 s of each step for itself from second 20 to 40, and worker 0 waits."""
    own = {"worker 0": 0.1, "worker 1": 0.3}
    return run(
        *(
            process(
                task,
                0,
                first_step(10, 1),
                steps(10, 20, 2, 51, waited=0.0),
                steps(20, 40, 52, 101, waited=20 - 50 * own_s),
                progress(20, 51, 101, loss=2.0, accuracy=0.5),
                progress(40, 101, 101, loss=1.0, accuracy=0.75),
                memory(5, 100 * 1024**2, 400),
                memory(35, 300 * 1024**2, 600),
                end(41),
            )
            for task, own_s in own.items()
        )
    )


def members_come_and_go() -> RunEvents:
    """Three workers; worker 1 is killed twice, and joins again twice. Two steps a second.

    The last step before a loss or a join ends at second 20, 30, 40 and 50. The first one after it
    ends 1.5, 1, 2 and 1 seconds later.
    """
    stayed = (
        members(5, 0, 3, pause_s=None, step_s=None),
        first_step(10, 1),
        steps(10, 20, 2, 21),
        members(21.5, 1, 2, lost="1", pause_s=1.0),
        steps(20, 21.5, 22, 22),
        steps(21.5, 30, 23, 39),
        members(31, 2, 3, joined="1", pause_s=0.5),
        steps(30, 31, 40, 40),
        steps(31, 40, 41, 58),
        members(42, 3, 2, lost="1", pause_s=1.5),
        steps(40, 42, 59, 59),
        steps(42, 50, 60, 75),
        members(51, 4, 3, joined="1", pause_s=0.5),
        steps(50, 51, 76, 76),
        steps(51, 60, 77, 94),
        end(62),
    )
    return run(
        process("launcher 0", 0, end(63)),
        process("worker 0", 0, *stayed),
        process("worker 1", 0, *stayed[:3]),
        process("worker 2", 0, *stayed),
        process(
            "worker 1",
            22,
            members(30.25, 2, 3, pause_s=None, step_s=None),
            first_step(31, 40),
            steps(31, 40, 41, 58),
            attempt=1,
        ),
        process(
            "worker 1",
            43,
            members(50.25, 4, 3, pause_s=None, step_s=None),
            first_step(51, 76),
            steps(51, 60, 77, 94),
            end(62),
            attempt=2,
        ),
    )


def gang_restart() -> RunEvents:
    """Worker 1 is killed after step 31 at second 40; both go on from step 21."""
    before = (first_step(10, 1), steps(10, 40, 2, 31))
    after = (restored(55, 21), first_step(58, 22), steps(58, 78, 23, 42), end(78))
    return run(
        process("launcher 0", 0, restart(47, 1), end(78)),
        process("worker 0", 0, *before, failure(45, "worker 1", silence_s=4.5), end(46, 1)),
        process("worker 1", 0, *before),
        process("worker 0", 48, *after, attempt=1),
        process("worker 1", 48, *after, attempt=1),
    )


def long_run(num_failures: int, whole_s: int = 600) -> RunEvents:
    """Twenty steps a second, a save behind them every twenty seconds, failures evenly spread."""
    processes, second, saved, reached = [], 0, 0, 0
    deaths = [whole_s * (number + 1) // (num_failures + 1) for number in range(num_failures)]
    for attempt, death in enumerate([*deaths, whole_s - 1]):
        first_s = second + 5
        lines: list[Event] = [] if attempt == 0 else [restored(second + 2, saved, "backup")]
        lines.append(first_step(first_s, saved + 1))
        reached = saved + 1
        for now in range(first_s, death):
            lines.append(steps(now, now + 1, reached + 1, reached + 20, busy=0.99))
            reached += 20
            if now % 20 == 0:
                lines += save(now + 1, now + 4, reached, stall_s=0.2)
                saved = reached
        both = [failure(death + 1, "worker 1"), end(death + 1.5, 1)]
        tail = [[end(whole_s)]] * 2 if death == whole_s - 1 else [both, []]
        processes += [
            process(f"worker {index}", second, *lines, *tail[index], attempt=attempt)
            for index in range(2)
        ]
        second = death + 2
    return run(*processes)


def write(folder: Path, events: RunEvents) -> None:
    """The files that the processes of a run would have written."""
    (folder / "events").mkdir(parents=True)
    for number, one in enumerate(events.processes):
        text = "".join(f"{encode(event)}\n" for event in one.events)
        (folder / "events" / f"{one.task.replace(' ', '-')}.{number}.jsonl").write_text(text)


def parts(account: Account) -> dict[str, float]:
    """The causes that took any time."""
    return {cause: round(time_s, 6) for cause, time_s in account.time_s.items() if time_s > 1e-9}


def times(account: Account) -> list[tuple[float, float | None, float | None]]:
    """Returns the time, detection time and recovery time of each failure."""
    return [(one.told_s, one.detect_s, one.resume_s) for one in account.failures]
