"""Validation of messages between process 0 and the others.

A run may have no secret, and any program on its hosts can then connect to the port of a group. So
invalid messages are rejected here. Later code relies on every field and its type.
"""

from __future__ import annotations

import asyncio
from types import NoneType
from typing import Any

from stratagem.frames import MAX_FRAME_BYTES, read_frame
from stratagem.process_group.verdict import Activity

__all__ = ["MAX_HELLO_BYTES", "read_answer", "read_message"]

# It names the cluster, which may have thousands of tasks.
MAX_HELLO_BYTES = 2**20

_ANYTHING = (NoneType, bool, int, float, str, list, dict)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "hello": {"process_id": (int,), "num_processes": (int,), "facts": (dict,)},
    "beat": {"position": (str,), "name": (str,), "step": (int,), "moves": (int,)},
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
    "welcome": {"addresses": (list,)},
    "progress": {"missing": (list,)},
    "beat": {},
    "exchanged": {"stream": (str,), "number": (int,), "values": (list,)},
    "abandoned": {"stream": (str,), "number": (int,), "by": (list,)},
    "announced": {"topic": (str,), "process_id": (int,), "numbers": (list,)},
    "gone": {"left": (list,)},
    "verdict": {
        "error": (str,),
        "message": (str,),
        "lost": (NoneType, str),
        "silent_s": (NoneType, int, float),
    },
}
_LISTS: dict[str, type] = {
    "addresses": str,
    "values": object,
    "missing": str,
    "by": str,
    "numbers": int,
    "left": bool,
}
# They have an item per process.
_OF_EACH = ("addresses", "left", "values")
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
    ):
        raise ConnectionError(f"received a message of kind {kind!r} with invalid fields")
    return message


async def read_answer(reader: asyncio.StreamReader, num_processes: int) -> dict[str, Any]:
    """Reads a message of process 0; raises ConnectionError as `read_message`."""
    message = await read_frame(reader)
    kind = message.get("kind")
    fields = _ANSWERS.get(kind) if isinstance(kind, str) else None
    is_valid = fields is not None and _has(message, fields)
    for name in _LISTS.keys() & fields.keys() if is_valid and fields else ():
        items = message[name]
        is_valid &= all(_LISTS[name] in (object, type(item)) for item in items)
        is_valid &= name not in _OF_EACH or len(items) == num_processes
    if not is_valid:
        raise ConnectionError(f"received an unknown answer: {str(message)[:200]}")
    return message


def _has(holder: dict[str, Any], fields: dict[str, tuple[type, ...]]) -> bool:
    """True if all fields have one of their types; unlike in Python, a bool is not an int."""
    return all(name in holder and type(holder[name]) in types for name, types in fields.items())
