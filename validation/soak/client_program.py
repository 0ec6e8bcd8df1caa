"""Many cheap clients of parameter servers in one process; a few are replaced all the time.

`client_program.py CLUSTER NUMBER`: CLUSTER is the pickled `ClientPlan`. Writes what servers
acknowledged to `acknowledged-NUMBER.json` in the plan's folder.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import sys
import time
from pathlib import Path

import numpy as np

from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout

__all__ = ["ClientPlan"]


@dataclasses.dataclass(frozen=True)
class ClientPlan:
    """Keys, variables and folder of the clients; `folder/addresses.json` has the servers."""

    keys: ClusterKeys
    layouts: list[ShardLayout]
    folder: Path
    num_clients: int
    pause_s: float
    replaced_share: float

    def addresses(self) -> list[str]:
        return json.loads((self.folder / "addresses.json").read_text())


class _Client:
    def __init__(self, plan: ClientPlan) -> None:
        self._plan = plan
        self._connections = Connections(
            plan.keys, plan.addresses(), locate=lambda server: plan.addresses()[server]
        )
        self.client = ServerClient(self._connections)
        for layout in plan.layouts:
            self.client.know(layout)

    def close(self) -> None:
        self._connections.close()


def _main(plan: ClientPlan, number: int) -> None:
    chance = random.Random(number)
    clients = [_Client(plan) for _ in range(plan.num_clients)]
    acknowledged = {layout.name: 0 for layout in plan.layouts}
    ones = {layout.name: np.ones(layout.shape, layout.dtype) for layout in plan.layouts}
    while not (plan.folder / "end").exists():
        place = chance.randrange(len(clients))
        if chance.random() < plan.replaced_share:
            clients[place].close()
            clients[place] = _Client(plan)
        name = chance.choice(plan.layouts).name
        clients[place].client.assign(name, ones[name], sign=1)
        acknowledged[name] += 1
        clients[place].client.pull([name])
        time.sleep(plan.pause_s)
    for one in clients:
        one.close()
    path = plan.folder / f"acknowledged-{number}.json"
    path.write_text(json.dumps(acknowledged))


if __name__ == "__main__":
    _main(pickle.loads(Path(sys.argv[1]).read_bytes()), int(sys.argv[2]))
