"""Background writes of server state to its journal; updates do not wait for the disk."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence

from stratagem.closing import Closing
from stratagem.group.transport.journal import Journal
from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.state import ServerState
from stratagem.parameter_server.server.store import Marks

# A journal is rewritten when it is this many times as large as the state,
_MOST_TIMES = 2
# plus an allowance for counters and names,
_SLACK_BYTES = 2**20
# and has grown so much since it was rewritten: row numbers may be larger than a row,
_MOST_GROWTH = 1.5
# or when an entry would copy more than this size and more than 1/8 of the state.
_MOST_COPIED_BYTES = 2**26
_COPIED_PART = 8
# Rounds of writing rows that changed meanwhile, before the rest is copied at once.
_MOST_ROUNDS = 5


class StateJournal(Closing):
    """Thread that writes changes to a journal, pausing `interval_s` seconds after each entry.

    `journaled_version` is the version in the last entry; None before the first one. `error`
    describes the failure of the last write; None if it succeeded. Closes `journal` when closed.

    With `is_durable`, changes are answered only once they are on disk, and each change makes the
    thread write at once. Changes that arrive during a write share the next entry.
    """

    def __init__(
        self, journal: Journal, state: ServerState, interval_s: float, *, is_durable: bool = False
    ) -> None:
        self._journal = journal
        self._state = state
        self._interval_s = interval_s
        self._writing = threading.Lock()
        self._num_written = state.num_changes
        self._position = state.store.tiers.position
        state.store.tiers.save = self.write
        self._rewritten_bytes = 0
        self._is_over = threading.Event()
        self._is_due = threading.Event()
        self._held: deque[tuple[Sequence[Request], Message]] = deque()
        if is_durable:
            state.changes.hold = self._hold
        self.journaled_version = state.lifetime.restored_version
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def write(self) -> int:
        """Writes all changes, and returns the version on disk.

        If this raises OSError, the next entry includes these changes.
        """
        with self._writing:
            held: list[tuple[Sequence[Request], Message]] = []
            try:
                self._write(held)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                for requests, _ in held:
                    for request in requests:
                        request.fail(error)
                raise
            self.error = None
            for requests, answer in held:
                for request in requests:
                    request.answer(answer)
            self._flush()
            return self.journaled_version or 0

    def close(self) -> None:
        """Stops the thread and writes the last changes, which may raise OSError."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._is_due.set()
        self._thread.join()
        try:
            self.write()
        finally:
            self._journal.close()

    def _run(self) -> None:
        while True:
            self._is_due.wait(self._interval_s)
            if self._is_over.is_set():
                return
            self._is_due.clear()  # before writing: a later change sets it again
            with contextlib.suppress(Exception):  # reported in `error`
                self.write()

    def _hold(self, requests: Sequence[Request], answer: Message) -> None:
        """Holds an answer until the next entry is on disk."""
        self._held.append((requests, answer))
        self._is_due.set()

    def _take_held(self, held: list[tuple[Sequence[Request], Message]]) -> None:
        """Moves the held answers to `held`. Call within `changing`, before copying the state."""
        held += [self._held.popleft() for _ in range(len(self._held))]

    def _flush(self) -> None:
        """Writes rows of tables with tiers to disk."""
        try:
            self._state.store.tiers.flush(self._position)
        except OSError as error:
            self.error = f"{type(error).__name__}: {error}"
            raise

    def _write(self, held: list[tuple[Sequence[Request], Message]]) -> None:
        state, store = self._state, self._state.store
        with self._put_back_on_error() as taken:
            with store.changing():
                self._take_held(held)
                num_changes, version, position = state.num_changes, store.version, state.position
                if num_changes == self._num_written and self.journaled_version is not None:
                    return
                entry = None
                # Within `changing`: creating a table holds it until all rows are marked.
                if not self._begins_anew():
                    taken.append(store.take_marks())
                    entry = state.entry(store.saved(taken[0]))
            if entry is not None:
                self._journal.append(entry)
                self._num_written, self.journaled_version = num_changes, version
                self._position = position
                return
        self._write_anew(held)

    def _begins_anew(self) -> bool:
        most_bytes = max(
            _MOST_TIMES * self._state.store.size_bytes + _SLACK_BYTES,
            _MOST_GROWTH * self._rewritten_bytes,
        )
        return self._journal.size_bytes > most_bytes or self._is_much_marked()

    def _is_much_marked(self) -> bool:
        """Returns True if the changes are too large to copy at once."""
        store = self._state.store
        return store.marked_bytes > max(_MOST_COPIED_BYTES, store.size_bytes // _COPIED_PART)

    def _write_anew(self, held: list[tuple[Sequence[Request], Message]]) -> None:
        """Rewrites the journal. Copies tables in pieces: memory may not hold two copies."""
        state, store = self._state, self._state.store
        num_changes, version, position = 0, 0, self._position

        def messages() -> Iterator[Message]:
            nonlocal num_changes, version, position
            with store.changing():
                taken.append(store.take_marks())
            yield from state.pieces()
            for _ in range(_MOST_ROUNDS):  # many rows changed, or got new slots
                with store.changing():
                    if not self._is_much_marked():
                        break
                    taken.append(store.take_marks())
                yield from state.pieces(taken[-1])
            with store.changing():
                self._take_held(held)
                num_changes, version, position = state.num_changes, store.version, state.position
                taken.append(store.take_marks())
                entry = state.entry(store.saved(taken[-1], is_all=True))
            yield entry

        with self._put_back_on_error() as taken:
            self._journal.replace(messages())
        self._rewritten_bytes = self._journal.size_bytes
        self._num_written, self.journaled_version = num_changes, version
        self._position = position

    @contextlib.contextmanager
    def _put_back_on_error(self) -> Generator[list[Marks]]:
        taken: list[Marks] = []
        try:
            yield taken
        except BaseException:
            for marks in taken:
                self._state.store.put_back(marks)
            raise
