"""Parameter servers: processes that hold variables, and how others read and change these."""

from stratagem.servers.client import ServerClient
from stratagem.servers.connection import Connections, ServerError
from stratagem.servers.keys import ClusterKeys
from stratagem.servers.listener import Listener, Request
from stratagem.servers.lost_updates import LostUpdates
from stratagem.servers.server import ParameterServer
from stratagem.servers.shard_layout import ShardLayout, ShardPlacer
from stratagem.servers.shards import ShardSpec
from stratagem.servers.store import ServerVariables
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
    "Pushed",
    "Request",
    "ServerClient",
    "ServerError",
    "ServerVariables",
    "ShardLayout",
    "ShardPlacer",
    "ShardSpec",
    "Slot",
    "State",
    "UpdateMode",
    "UpdateRule",
    "kept_name",
    "pack",
    "unpack",
]
