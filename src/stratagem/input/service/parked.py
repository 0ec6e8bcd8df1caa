"""Requests that are answered once there is something to say."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message


@dataclasses.dataclass(frozen=True)
class _Parked:
    """A request, how its answer is found, the answer without one, and what it waits for."""

    request: Request
    find: Callable[[], Message | None]
    otherwise: Message
    until_s: float
    tag: tuple[str, int] | None


class ParkedRequests:
    """Requests that wait. Not thread-safe: use under the lock of what they wait for."""

    def __init__(self) -> None:
        self._parked: list[_Parked] = []

    def answer_when(
        self,
        request: Request,
        find: Callable[[], Message | None],
        *,
        otherwise: Message,
        limit_s: float,
        tag: tuple[str, int] | None = None,
    ) -> None:
        """Answers with what `find` returns as soon as it is not None, else after `limit_s`.

        `tag` is a split that the request waits for.
        """
        if (answer := find()) is not None:
            request.answer(answer)
            return
        self._parked.append(_Parked(request, find, otherwise, time.monotonic() + limit_s, tag))

    def look_again(self) -> None:
        """Answers the requests that can be answered by now."""
        parked, self._parked = self._parked, []
        now_s = time.monotonic()
        for one in parked:
            try:
                answer = one.find()
            except Exception as error:  # noqa: BLE001 - sent to the waiting client
                one.request.fail(error)
                continue
            if answer is None and now_s >= one.until_s:
                answer = one.otherwise
            if answer is None:
                self._parked.append(one)
            else:
                one.request.answer(answer)

    def wanted_of(self, run: str) -> list[int]:
        """Returns the splits of a run that requests wait for."""
        return sorted({one.tag[1] for one in self._parked if one.tag and one.tag[0] == run})
