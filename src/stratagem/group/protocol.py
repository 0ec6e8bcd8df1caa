"""Validation of messages between process 0 and the others.

A run may have no secret, and any program on its hosts can then connect to the port of a group. So
invalid messages are rejected here. Later code relies on every field and its type.
"""

from __future__ import annotations

import asyncio
import json
from types import NoneType
from typing import Any

from stratagem.group.verdict import Activity

# Framed JSON messages between processes that coordinate over asyncio streams.
#
# A frame is a four-byte length and that many bytes of JSON. Nothing is ever unpickled.

MAX_FRAME_BYTES = 256 * 2**20


def frame(message: dict[str, Any]) -> bytes:
    """Returns a JSON message as a frame."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "big") + text


async def read_frame(
    reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES
) -> dict[str, Any]:
    """Reads one message; raises ConnectionError if the connection or frame is broken."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > max_bytes:
            raise ConnectionError(f"received a frame of {size} bytes, which is too large")
        message = json.loads(await reader.readexactly(size))
    except ConnectionError:
        raise
    except (asyncio.IncompleteReadError, OSError, ValueError, RecursionError) as error:
        raise ConnectionError(f"closed by the other side ({error})") from error
    if not isinstance(message, dict):
        raise ConnectionError("received a frame that holds no JSON object")
    return message


# It names the cluster, which may have thousands of tasks.
MAX_HELLO_BYTES = 2**20

_ANYTHING = (NoneType, bool, int, float, str, list, dict)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "hello": {"process_id": (int,), "num_processes": (int,), "facts": (dict,)},
    "beat": {
        "position": (str,),
        "name": (str,),
        "step": (int,),
        "moves": (int,),
        "calls": (int,),
    },
    "assigned": {"calls": (int,), "digest": (int,), "notes": (list,)},
    "exchange": {
        "stream": (str,),
        "number": (int,),
        "name": (str,),
        "value": _ANYTHING,
        "limit_s": (NoneType, int, float),
        "setting": (str,),
    },
    "leave": {"stream": (str,)},
    "announce": {"topic": (str,), "numbers": (list,)},
    "error": {"text": (str,)},
    "gone": {},
}
_FACTS: dict[str, tuple[type, ...]] = {
    "host": (str,),
    "pid": (int,),
    "address": (str,),
    "same": (dict,),
}
_ANSWERS: dict[str, dict[str, tuple[type, ...]]] = {
    "welcome": {"address": (str,)},
    "progress": {"num_missing": (int,), "missing": (str,)},
    "beat": {},
    "exchanged": {"stream": (str,), "number": (int,), "runs": (list,)},
    "abandoned": {"stream": (str,), "number": (int,), "by": (list,)},
    "announced": {"announcements": (list,)},
    "agreed": {"count": (int,)},
    "gone": {},
    "verdict": {
        "error": (str,),
        "message": (str,),
        "lost": (NoneType, str),
        "silent_s": (NoneType, int, float),
    },
}
_ACTIVITIES = frozenset(kind.value for kind in Activity)


async def read_message(
    reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES
) -> dict[str, Any]:
    """Reads a message; raises ConnectionError if it is invalid or the connection is closed."""
    message = await read_frame(reader, max_bytes)
    kind = message.get("kind")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or not _has(message, fields):
        raise ConnectionError(f"received an unknown message: {str(message)[:200]}")
    if (
        (kind == "hello" and not _has(message["facts"], _FACTS))
        or (kind == "beat" and message["position"] not in _ACTIVITIES)
        # Relayed unchanged; receivers do not validate it again.
        or (kind == "announce" and any(type(number) is not int for number in message["numbers"]))
        or (kind == "assigned" and not (message["notes"] and all(map(_is_note, message["notes"]))))
    ):
        raise ConnectionError(f"received a message of kind {kind!r} with invalid fields")
    return message


async def read_answer(reader: asyncio.StreamReader, num_processes: int) -> dict[str, Any]:
    """Reads a message of process 0; raises ConnectionError as `read_message`."""
    message = await read_frame(reader)
    kind = message.get("kind")
    fields = _ANSWERS.get(kind) if isinstance(kind, str) else None
    is_valid = fields is not None and _has(message, fields)
    if is_valid and kind == "abandoned":
        is_valid = all(type(label) is str for label in message["by"])
    elif is_valid and kind == "announced":
        is_valid = all(map(_is_announcement, message["announcements"]))
    elif is_valid and kind == "exchanged":
        runs = message["runs"]
        is_valid = all(map(_is_run, runs)) and sum(run[1] for run in runs) == num_processes
    if not is_valid:
        raise ConnectionError(f"received an unknown answer: {str(message)[:200]}")
    return message


def _is_run(run: object) -> bool:
    """True for a value and the number of successive processes that sent it."""
    return isinstance(run, list) and len(run) == 2 and type(run[1]) is int and run[1] > 0


def _is_announcement(one: object) -> bool:
    """True for a topic, a process id, and numbers."""
    if not isinstance(one, list) or [type(part) for part in one] != [str, int, list]:
        return False
    return all(type(number) is int for number in one[2])


def _is_note(one: object) -> bool:
    """True for a variable's number and path, a digest, and a place of the program."""
    return isinstance(one, list) and [type(part) for part in one] == [int, str, int, str]


def _has(holder: dict[str, Any], fields: dict[str, tuple[type, ...]]) -> bool:
    """True if all fields have one of their types; unlike in Python, a bool is not an int."""
    return all(name in holder and type(holder[name]) in types for name, types in fields.items())
