"""Parameter servers: processes that hold variables, and how others read and change these."""

from stratagem.servers.client import ServedVariables
from stratagem.servers.connection import Connections, ServerError
from stratagem.servers.keys import ClusterKeys
from stratagem.servers.listener import Listener, Request
from stratagem.servers.lost_updates import LostUpdates
from stratagem.servers.placement import Placement, Placer
from stratagem.servers.server import ParameterServer
from stratagem.servers.shards import ShardSpec
from stratagem.servers.store import Store
from stratagem.servers.updates import (
    ASYNCHRONOUS,
    Pushed,
    Slot,
    State,
    UpdateMode,
    UpdateRule,
    kept_name,
)
from stratagem.servers.wire import Message, pack, unpack

__all__ = [
    "ASYNCHRONOUS",
    "ClusterKeys",
    "Connections",
    "Listener",
    "LostUpdates",
    "Message",
    "ParameterServer",
    "Placement",
    "Placer",
    "Pushed",
    "Request",
    "ServedVariables",
    "ServerError",
    "ShardSpec",
    "Slot",
    "State",
    "Store",
    "UpdateMode",
    "UpdateRule",
    "kept_name",
    "pack",
    "unpack",
]
