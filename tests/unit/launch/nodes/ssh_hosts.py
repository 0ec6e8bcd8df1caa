"""Hosts with an SSH server each, on one machine: network namespaces with real `sshd`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.multiprocess.namespaces import can_make_hosts, hosts
from tests.unit.launch.waiting import until

__all__ = ["NAMES", "SshHosts", "reason_to_skip", "ssh_hosts", "wait_for_end_of"]

NAMES = ("a", "b", "c", "d")
_SSHD = "/usr/sbin/sshd"
_CONFIG = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PermitRootLogin yes
UsePAM no
PasswordAuthentication no
"""
_SOURCES = Path(__file__).parents[4] / "src"


def reason_to_skip() -> str | None:
    """Returns the reason why there can be no such hosts here, or None."""
    programs = (_SSHD, "ssh", "ssh-keygen", "unshare")
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)}"
    return None if can_make_hosts() else "no network namespaces"


@dataclasses.dataclass(frozen=True)
class SshHosts:
    """The hosts `NAMES`, and a terminal beside them from which `ssh` reaches them."""

    folder: Path
    namespaces: Sequence[str]
    servers: dict[str, subprocess.Popen[bytes]] = dataclasses.field(default_factory=dict)

    @property
    def ssh_options(self) -> str:
        """Options with which `ssh` logs in."""
        known = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"
        return f"-i {self.folder}/key {known}"

    def answers(self, name: str) -> bool:
        """Whether one can log in to a host."""
        command = ["ip", "netns", "exec", self.namespaces[-1], "ssh", *self.ssh_options.split()]
        return subprocess.run([*command, name, "true"], capture_output=True).returncode == 0

    def launch(self, *words: str, folder: Path, **more) -> subprocess.Popen[str]:
        """Starts `stratagem launch` in the terminal, with these options and this script."""
        start = ["ip", "netns", "exec", self.namespaces[-1]]
        command = [sys.executable, "-m", "stratagem", "launch", "--ssh-options"]
        return subprocess.Popen(
            [*start, *command, self.ssh_options, "--env", "PYTHONPATH", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**_variables(), "PYTHONPATH": str(_SOURCES), "JAX_PLATFORMS": "cpu"},
            **more,
        )

    def plug(self, name: str, state: str) -> None:
        """Sets the network device of a host "up" or "down"."""
        namespace = self.namespaces[NAMES.index(name)]
        subprocess.run(["ip", "-n", namespace, "link", "set", "eth0", state], check=True)

    def boot(self, name: str) -> None:
        """Starts the SSH server of a host, and waits until it answers."""
        start = f"hostname {name} && exec {_SSHD} -D -e -f {self.folder}/sshd_config"
        namespace = self.namespaces[NAMES.index(name)]
        self.servers[name] = subprocess.Popen(
            ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", start],
            stderr=subprocess.DEVNULL,
        )
        until(lambda: self.answers(name))

    def kill(self, name: str) -> None:
        """Kills all processes of a host at once, the SSH server among them."""
        namespace = self.namespaces[NAMES.index(name)]
        listed = subprocess.run(
            ["ip", "netns", "pids", namespace], check=True, capture_output=True, text=True
        )
        for pid in listed.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        self.servers[name].wait()


@contextlib.contextmanager
def ssh_hosts(folder: Path, network: str) -> Iterator[SshHosts]:
    """Makes the hosts, and removes them with all that runs there."""
    Path("/run/sshd").mkdir(exist_ok=True)
    (folder / "sshd_config").write_text(_CONFIG.format(folder=folder))
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")]
    subprocess.run(keygen, check=True)
    table = "127.0.0.1 localhost\n" + "".join(
        f"{network}.{index} {name}\n" for index, name in enumerate(NAMES, start=1)
    )
    with hosts(len(NAMES) + 1, network) as made, contextlib.ExitStack() as stack:
        namespaces = [command[-1] for command, _ in made]
        for namespace in namespaces:
            own = Path("/etc/netns") / namespace
            own.mkdir(parents=True)
            stack.callback(shutil.rmtree, own)
            (own / "hosts").write_text(table)
        made_hosts = SshHosts(folder, namespaces)
        for name in NAMES:
            made_hosts.boot(name)
            stack.callback(made_hosts.kill, name)
        yield made_hosts


def processes_with(word: str) -> set[int]:
    """Returns the processes that have a word in their environment or on their command line."""
    found: set[int] = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            texts = [(path / name).read_bytes() for name in ("environ", "cmdline")]
            if any(word.encode() in text for text in texts):
                found.add(int(path.name))
    return found - {os.getpid()}


def wait_for_end_of(word: str, limit_s: float = 30.0) -> set[int]:
    """Waits until no process with a word is left; returns those that are."""
    deadline_s = time.monotonic() + limit_s
    while (left := processes_with(word)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return left


def _variables() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith("STRATAGEM_")}
