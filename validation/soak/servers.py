"""Soak of parameter servers with 200 clients: a server is killed every two minutes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import stratagem as sg
from stratagem.group.transport.connection import Connections
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout
from validation.soak.client_program import ClientPlan
from validation.soak.sampling import Sampler

__all__ = ["soak_servers"]

_NUM_SERVERS = 2
_NUM_PROCESSES = 4
_CLIENTS_PER_PROCESS = 50
_END_S = 120.0


def soak_servers(
    folder: Path, duration_s: float, kill_every_s: float, report: Callable[[str], None]
) -> dict[str, object]:
    """Updates for `duration_s`; returns the numbers of kills and of updates, and what was lost."""
    warnings.filterwarnings("ignore", "Parameter servers restarted")
    layouts = [ShardLayout(f"sum {n}", (64,), "float32", (n,), (64,)) for n in range(_NUM_SERVERS)]
    options = sg.coordinator.options(durable_updates=True)
    with sg.ParameterServerStrategy(
        num_workers=1, num_servers=_NUM_SERVERS, options=options
    ) as strategy:
        cluster: Any = strategy.cluster
        addresses = list(cluster.server_addresses)
        _write_addresses(folder, addresses)
        cluster.report_moves_to(lambda *move: _move(folder, addresses, *move))
        with Connections(
            cluster.keys, addresses, locate=lambda server: cluster.locate_server(server)
        ) as connections:
            client = ServerClient(connections)
            for layout in layouts:
                client.create(layout, np.zeros(64, "float32"))
            plan = ClientPlan(cluster.keys, layouts, folder, _CLIENTS_PER_PROCESS, 0.02, 0.02)
            (folder / "plan.pickle").touch(mode=0o600)
            (folder / "plan.pickle").write_bytes(pickle.dumps(plan))
            num_kills = _run(folder, duration_s, kill_every_s, cluster, report)
            values = client.pull([layout.name for layout in layouts])
    found = {name: float(value[0]) for name, value in values.items()}
    acknowledged = dict.fromkeys(found, 0)
    for path in folder.glob("acknowledged-*.json"):
        for name, count in json.loads(path.read_text()).items():
            acknowledged[name] += count
    return {"kills": num_kills, "acknowledged": acknowledged, "found": found}


def _run(
    folder: Path,
    duration_s: float,
    kill_every_s: float,
    cluster: Any,
    report: Callable[[str], None],
) -> int:
    program = str(Path(__file__).with_name("client_program.py"))
    command = [sys.executable, program, str(folder / "plan.pickle")]
    sampler = Sampler(folder / "samples.jsonl", [Path("/dev/shm"), folder])
    num_kills, next_kill_s = 0, kill_every_s
    with (folder / "output.log").open("wb") as output:
        clients = [
            subprocess.Popen([*command, str(number)], stdout=output, stderr=output)
            for number in range(_NUM_PROCESSES)
        ]
        while sampler.time_s < duration_s:
            roles = {f"clients {number}": one.pid for number, one in enumerate(clients)}
            roles |= {f"server {n}": pid for n, pid in enumerate(cluster.servers.pids)}
            sampler.sample({"coordinator": os.getpid(), **roles})
            if ended := [one.returncode for one in clients if one.poll() is not None]:
                raise RuntimeError(f"Clients ended with {ended}: see {folder}.")
            if sampler.time_s >= next_kill_s:
                cluster.servers.kill(0)  # the other lives as long as the soak
                num_kills += 1
                next_kill_s += kill_every_s
            report(f"{num_kills} kills")
            time.sleep(min(5.0, kill_every_s / 4))
        (folder / "end").touch()
        codes = [one.wait(_END_S) for one in clients]
    sampler.close()
    if any(codes):
        raise RuntimeError(f"Clients ended with {codes}: see {folder}.")
    return num_kills


def _move(folder: Path, addresses: list[str], server: int, address: str) -> None:
    addresses[server] = address
    _write_addresses(folder, addresses)


def _write_addresses(folder: Path, addresses: list[str]) -> None:
    written = folder / "addresses.json.new"
    written.write_text(json.dumps(addresses))
    written.replace(folder / "addresses.json")
