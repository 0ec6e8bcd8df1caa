"""Networks that lose, delay, cut or reset; ports that are taken; names that nobody resolves."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from validation.chaos.faults.kinds import Fault, FaultKind, NotHereError, Scene
from validation.chaos.faults.processes import choose, send

__all__ = ["KINDS"]

_LASTS_S = (0.5, 8.0)
_LOST_FRACTION = "0.3"
_CAUSES = "has not answered|died|closed|reset|lost|no progress|timed out|refused|did not"
# A connection of some process, as `ss` prints it.
_CONNECTION = re.compile(r"\s(\S+):(\d+)\s+(\S+):(\d+)\s+users:.*?pid=(\d+),")
_PORT_TAKEN_LIMIT_S = 30.0


@dataclasses.dataclass(frozen=True)
class _Connection:
    """One end of a connection."""

    here: tuple[str, str]
    there: tuple[str, str]
    pid: int

    def packets(self, *, out: bool) -> list[str]:
        """Words of iptables for the packets of one direction."""
        source, target = (self.here, self.there) if out else (self.there, self.here)
        ends = ["-s", source[0], "--sport", source[1], "-d", target[0], "--dport", target[1]]
        return ["INPUT", "-p", "tcp", *ends]


def _connections() -> list[_Connection]:
    printed = subprocess.run(
        ["ss", "-tnpH", "state", "established"], capture_output=True, text=True, check=True
    ).stdout
    return [
        _Connection((here, port), (there, far), int(pid))
        for here, port, there, far, pid in _CONNECTION.findall(printed)
        if ":" not in here
    ]


def _connected(scene: Scene) -> tuple[str, int, list[_Connection]]:
    """Draws a process that has connections."""
    by_pid: dict[int, list[_Connection]] = {}
    for connection in _connections():
        by_pid.setdefault(connection.pid, []).append(connection)
    named = {name: pid for name, pid in scene.job.processes().items() if pid in by_pid}
    if not named:
        raise NotHereError("no process has a connection")
    name = scene.chance.choice(sorted(named))
    return name, named[name], by_pid[named[name]]


def _change(change: str, rules: Sequence[Sequence[str]]) -> None:
    for rule in rules:
        subprocess.run(["iptables", "-w", change, *rule], check=True, capture_output=True)


def _lasts_s(scene: Scene) -> float | None:
    return None if scene.chance.random() < 0.3 else scene.chance.uniform(*_LASTS_S)


def _filtered(
    kind: str, scene: Scene, rules: list[list[str]], where: str, lasts_s: float | None
) -> Fault:
    _change("-A", rules)
    return Fault(
        kind=kind,
        where=where,
        causes=_CAUSES,
        lift=partial(_change, "-D", rules),
        lasts_s=lasts_s,
    )


def _loss(scene: Scene) -> Fault:
    loss = ["-m", "statistic", "--mode", "random", "--probability", _LOST_FRACTION]
    rules = [["INPUT", "-p", "tcp", *loss, "-j", "DROP"]]
    return _filtered("packets lost", scene, rules, "everywhere", scene.chance.uniform(*_LASTS_S))


def _partition(is_one_way: bool, scene: Scene) -> Fault:
    name, _, connections = _connected(scene)
    directions = [scene.chance.random() < 0.5] if is_one_way else [True, False]
    rules = [[*one.packets(out=out), "-j", "DROP"] for one in connections for out in directions]
    kind = "partition one-way" if is_one_way else "partition"
    return _filtered(kind, scene, rules, name, _lasts_s(scene))


def _half_open(scene: Scene) -> Fault:
    """Kills a process whose peers do not hear that its connections are closed."""
    name, pid, connections = _connected(scene)
    if name == "launcher":
        raise NotHereError("the launcher has no connection to its tasks")
    rules = [[*one.packets(out=True), "-j", "DROP"] for one in connections]
    fault = _filtered("half-open", scene, rules, name, None)
    send(pid, signal.SIGKILL)
    return fault


def _reset(scene: Scene) -> Fault:
    connections = _connections()
    if not connections:
        raise NotHereError("no process has a connection")
    one = scene.chance.choice(connections)
    names = {pid: name for name, pid in scene.job.processes().items()}
    rules = [
        [*one.packets(out=out), "-j", "REJECT", "--reject-with", "tcp-reset"]
        for out in (True, False)
    ]
    where = names.get(one.pid, "another process")
    return _filtered("reset", scene, rules, where, scene.chance.uniform(*_LASTS_S))


def _delay(scene: Scene) -> Fault:
    """A slow link; the kernel's netem, which delays, is not everywhere."""
    rate = scene.chance.choice(("100kbit", "400kbit", "2mbit"))
    rule = ["root", "tbf", "rate", rate, "burst", "70k", "latency", "800ms"]
    made = subprocess.run(
        ["tc", "qdisc", "add", "dev", "lo", *rule], capture_output=True, text=True
    )
    if made.returncode:
        raise NotHereError(made.stderr.strip())
    return Fault(
        kind="delay",
        where=rate,
        causes=_CAUSES,
        lift=partial(subprocess.run, ["tc", "qdisc", "del", "dev", "lo", "root"], check=True),
        lasts_s=scene.chance.uniform(*_LASTS_S),
    )


def _port_taken(scene: Scene) -> Fault:
    """Takes the leader's port of the next start, which a killed process brings about."""
    processes = scene.job.processes()
    if "launcher" not in processes or len(processes) == 1:
        raise NotHereError("no launcher that starts tasks again")
    name, pid = choose(scene)
    while name == "launcher":
        name, pid = choose(scene)
    before = set(_leader_ports())
    send(pid, signal.SIGKILL)
    deadline_s = time.monotonic() + _PORT_TAKEN_LIMIT_S
    while time.monotonic() < deadline_s:
        for port in set(_leader_ports()) - before:
            taken = socket.socket()
            with contextlib.suppress(OSError):
                taken.bind(("127.0.0.1", port))
                taken.listen()
                return Fault(
                    kind="port taken",
                    where=f"that of worker 0, after the end of {name}",
                    causes="in use|SIGKILL|another program",
                    lift=taken.close,
                    lasts_s=scene.chance.uniform(*_LASTS_S),
                )
            taken.close()
            before.add(port)
        time.sleep(0.002)
    raise NotHereError(f"no new start after the end of {name}")


def _leader_ports() -> list[int]:
    """Ports of the first workers that the environments of processes name."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            for word in path.read_bytes().split(b"\0"):
                if word.startswith(b"TF_CONFIG={"):  # input workers have an empty one
                    workers = json.loads(word[10:])["cluster"].get("worker", [])
                    found += [int(address.rpartition(":")[2]) for address in workers[:1]]
    return found


def _no_names(scene: Scene) -> Fault:
    empty = scene.sandbox.home.parent / "no-names"
    empty.touch()
    files = [path for path in ("/etc/hosts", "/etc/resolv.conf") if Path(path).exists()]
    for path in files:
        subprocess.run(["mount", "--bind", str(empty), path], check=True)
    return Fault(
        kind="DNS gone",
        where=" and ".join(files),
        causes="resolve|name",
        lift=partial(_unmount, files),
        lasts_s=_lasts_s(scene),
    )


def _unmount(files: Sequence[str]) -> None:
    for path in files:
        subprocess.run(["umount", path], check=True)


KINDS = (
    FaultKind("packets lost", _loss),
    FaultKind("delay", _delay),
    FaultKind("partition", partial(_partition, False)),
    FaultKind("partition one-way", partial(_partition, True)),
    FaultKind("half-open", _half_open),
    FaultKind("reset", _reset),
    FaultKind("port taken", _port_taken),
    FaultKind("DNS gone", _no_names),
)
