"""After which step all processes save, when one of them got notice before preemption."""

from __future__ import annotations

import enum
import threading
import time

from stratagem.errors import DeadlineExceededError
from stratagem.group import Group, Kind
from stratagem.messages import explain
from stratagem.preemption import Notice, TerminationConfig

__all__ = ["AgreedStep", "Due"]

# How soon the end of a grace is seen, and how long a thread lives on after `stop`.
_LOOK_S = 0.2
# How often to look whether the group has ended while others are waited for.
_CHECK_S = 0.1
# The last step and the last save may take longer than those before.
_RESERVE = 2.0


class Due(enum.Enum):
    """What all processes do before their next step: save and go on, or save and leave."""

    SAVE = "save"
    LEAVE = "leave"


class AgreedStep:
    """Tells each process before which step all of them save, when any of them got notice.

    Every process asks before each of its steps, as often as the others. Without notice nothing
    travels between them. With one, each says how many steps it has begun, and begins no other until
    all have said so; the largest number is the step that all finish. They say so in a thread of
    the group, since a process may be inside of a step that waits for one that waits here.

    With a grace period the first agreement is to save, and there is another one to leave when the
    time of a process that got notice is nearly over: for two more steps and two more saves, by what
    the last ones took, it has to suffice.

    Args:
        config: what counts as notice, and how long there is then.
        group: that this process belongs to; None for a process by itself.
        name: the same on all processes, and new.

    Source: TF 2.21 failure_handling.py, _check_preemption_and_maybe_checkpoint.
    """

    def __init__(
        self, config: TerminationConfig, group: Group | None = None, *, name: str = "leaving"
    ) -> None:
        self.save_s = 0.0  # what the last save took
        self._config = config
        self._source = config.source()
        self._group = group
        self._name = name
        self._num_processes = 1 if group is None else group.num_processes
        self._stopped = threading.Event()
        # Held by nobody for long, and never by a signal handler.
        self._changed = threading.Condition()
        self._num_begun = 0
        self._begun_at_s = time.monotonic()
        self._last_step_s = self._step_s = 0.0
        # Agreements, counted: asked for by this process, heard of, and done here.
        self._num_asked = self._num_heard = self._num_done = 0
        # What each process has said for each: steps begun, whether it is the last.
        self._said: dict[int, dict[int, tuple[int, bool]]] = {}
        self._is_over = False

    @property
    def notice(self) -> Notice | None:
        """The first notice that this process got; None where none, or another one, did.

        Raises:
            Exception: listening has failed. The error is the one that ended it.
        """
        return self._source.notice

    def start(self) -> None:
        """Begins to listen for notices, to this process and to others.

        Raises:
            RuntimeError: it cannot listen here, as outside the main thread.
        """
        if self._group is not None:
            self._group.listen(self._name, self._hear)
        self._source.start()
        if self._group is not None:
            threading.Thread(target=self._watch, name="stratagem-notice", daemon=True).start()

    def stop(self) -> None:
        """Ends listening for notices to this process; others are still answered."""
        self._stopped.set()
        self._source.stop()

    def next_step(self) -> Due | None:
        """Asks whether this process may begin its next step, and counts that step if so.

        Returns:
            None for yes. What to do before it else: then it is asked for again.

        Raises:
            DeadlineExceededError: a process did not say how far it is; the message names it.
            UnavailableError: one was lost. Exception: what ended listening for notices.
        """
        self._ask_if_time()
        with self._changed:
            if self._num_done == self._num_heard:
                return self._begin()
            number = self._num_done + 1
            said = self._said.setdefault(number, {})
        if len(said) < self._num_processes:
            self._wait_for_all(said)
        with self._changed:
            if self._num_begun < max(begun for begun, _ in said.values()):
                return self._begin()
            self._num_done = number
            self._is_over = any(is_last for _, is_last in said.values())
        return Due.LEAVE if self._is_over else Due.SAVE

    def _begin(self) -> None:
        now = time.monotonic()
        last_s, self._last_step_s = self._last_step_s, now - self._begun_at_s
        # Of the last two the shorter one: compiling and evaluating are not in every step.
        self._step_s = min(last_s, self._last_step_s)
        self._begun_at_s = now
        self._num_begun += 1

    def _wait_for_all(self, said: dict[int, tuple[int, bool]]) -> None:
        assert self._group is not None
        limit_s = self._group.limits.barrier_s
        deadline = time.monotonic() + (limit_s or float("inf"))
        with self._group.at(Kind.AGREEMENT, "the step to save after"), self._changed:
            while len(said) < self._num_processes:
                self._group.check()
                if time.monotonic() > deadline:
                    raise self._late(self._group, said)
                self._changed.wait(_CHECK_S)

    def _late(self, group: Group, said: dict[int, tuple[int, bool]]) -> DeadlineExceededError:
        labels = enumerate(group.identity.labels)
        missing = ", ".join(label for index, label in labels if index not in said)
        return DeadlineExceededError(
            explain(
                f"There is notice before preemption, and {missing} did not say within "
                f"{group.limits.barrier_s:g} s how far it is.",
                expected="an answer of every process (STRATAGEM_BARRIER_TIMEOUT_S), so that all "
                "save after the same step.",
                fix="make the PreemptionCheckpointHandler in every process.",
            )
        )

    def _ask_if_time(self) -> None:
        """Asks for an agreement, where this process got notice and there is none under way."""
        if self.notice is None:
            return
        with self._changed:
            number = self._num_done + 1
            if self._is_over or number <= max(self._num_asked, self._num_heard):
                return
            if number > 1 and not self._is_time_to_leave():
                return
            self._num_asked = number
        self._announce(number)

    def _is_time_to_leave(self) -> bool:
        notices = self._source.notices
        if not notices:
            return not self._config.grace_period
        ends_at_s = self._config.leave_at_s(notices)
        return time.monotonic() >= ends_at_s - _RESERVE * (self._step_s + self.save_s)

    def _announce(self, *numbers: int) -> None:
        if self._group is None:
            self._hear(0, list(numbers))
        else:
            self._group.announce(self._name, numbers)

    # What other threads call.

    def _watch(self) -> None:
        try:
            while self._source.wait(_LOOK_S) is None:
                if self._stopped.is_set():
                    return
            while not (self._stopped.is_set() or self._is_over):
                self._ask_if_time()
                self._stopped.wait(_LOOK_S)
        except Exception:  # noqa: BLE001 - raised by `next_step`, in the thread that trains
            return

    def _hear(self, process_id: int, numbers: list[int]) -> None:
        match numbers:
            case [number]:
                self._say(number)
            case [number, begun, is_last]:
                with self._changed:
                    self._said.setdefault(number, {})[process_id] = (begun, bool(is_last))
                    self._changed.notify_all()
            case _:
                pass  # of no process that fits to this one

    def _say(self, number: int) -> None:
        """Says how far this process is; it goes no further until all have said so."""
        with self._changed:
            if number != self._num_heard + 1:  # asked for by two at once
                return
            self._num_heard = number
            begun, is_last = self._num_begun, number > 1 or self._is_time_to_leave()
        self._announce(number, begun, int(is_last))
