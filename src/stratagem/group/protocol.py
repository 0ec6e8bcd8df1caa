"""What processes say to process 0: each kind of message, and what it holds.

Anybody can connect to the port of a group. What is none of these messages is refused here, so that
behind it every field is there and of its type.
"""

from __future__ import annotations

import asyncio
from types import NoneType
from typing import Any

from stratagem.group.verdict import Kind
from stratagem.group.wire import read_frame

__all__ = ["read_message"]

_ANYTHING = (NoneType, bool, int, float, str, list, dict)
_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "hello": {"process_id": (int,), "num_processes": (int,), "facts": (dict,)},
    "tunnel": {},
    "beat": {"place": (str,), "name": (str,), "step": (int,), "moves": (int,)},
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
_PLACES = frozenset(kind.value for kind in Kind)


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Reads one message of a process.

    Args:
        reader: of a connection that process 0 accepted.

    Returns:
        The message, with `kind` and the fields of that kind.

    Raises:
        ConnectionError: the connection was closed, or somebody sends what is no message.
    """
    message = await read_frame(reader)
    kind = message.get("kind")
    fields = _FIELDS.get(kind) if isinstance(kind, str) else None
    if fields is None or not _has(message, fields):
        raise ConnectionError(f"no message of this library: {str(message)[:200]}")
    if (
        (kind == "hello" and not _has(message["facts"], _FACTS))
        or (kind == "beat" and message["place"] not in _PLACES)
        # Passed on as it is: who hears it need not look at it again.
        or (kind == "announce" and any(type(number) is not int for number in message["numbers"]))
    ):
        raise ConnectionError(f"a message of this library with other contents: {kind}")
    return message


def _has(holder: dict[str, Any], fields: dict[str, tuple[type, ...]]) -> bool:
    """True and False are no numbers here, although Python takes them for such."""
    return all(name in holder and type(holder[name]) in types for name, types in fields.items())
