"""Validation of messages from processes to process 0.

Any program can connect to the port of a group, so invalid messages are rejected here. Later code
relies on every field and its type.
"""

from __future__ import annotations

import asyncio
from types import NoneType
from typing import Any

from stratagem.frames import read_frame
from stratagem.process_group.verdict import Activity

__all__ = ["read_message"]

_ANYTHING = (NoneType, bool, int, float, str, list, dict)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "hello": {"process_id": (int,), "num_processes": (int,), "facts": (dict,)},
    "tunnel": {},
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
_ACTIVITIES = frozenset(kind.value for kind in Activity)


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Reads a message; raises ConnectionError if it is invalid or the connection is closed."""
    message = await read_frame(reader)
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


def _has(holder: dict[str, Any], fields: dict[str, tuple[type, ...]]) -> bool:
    """True if all fields have one of their types; unlike in Python, a bool is not an int."""
    return all(name in holder and type(holder[name]) in types for name, types in fields.items())
