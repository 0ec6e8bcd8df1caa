"""A Slurm cluster on this machine, whose nodes have host names and addresses of their own."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

__all__ = ["NODES", "USERS", "Cluster"]

NODES = ("node1", "node2", "node3")
USERS = ("alice", "mallory")
"""Ordinary users, who may not be able to read the interpreter: most jobs are root's."""
_CPUS = 4
_BRIDGE = "10.31.0.254"
_DEADLINE_S = 60
_JOB_DEADLINE_S = 600
_INHERITED = ("XLA_FLAGS", "JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE")
_ROOT = Path(__file__).parents[2]

# Slurm is told of more cores than there are: the models are tiny. Requeued jobs may start as soon
# as their credentials have expired, 120 s by default.
_CONFIGURATION = f"""
ClusterName=tests
SlurmctldHost=controller({_BRIDGE})
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={{folder}}/state
SlurmdSpoolDir={{folder}}/spool-%n
SlurmdPidFile={{folder}}/slurmd-%n.pid
SlurmctldPidFile={{folder}}/slurmctld.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_setup_env_fail
SlurmdParameters=config_overrides
JobCompType=jobcomp/none
ReturnToService=2
KillWait=20
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{{nodes}}
PartitionName=short Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 GraceTime=60 State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF State=UP
"""


class Cluster:
    """Daemons of Slurm in network namespaces of this process, which all end with it.

    Needs namespaces of its own for mounts, processes and the network: `python -m
    validation.slurm` makes them, and removes `folder` when they have ended. `outside` is the
    namespace of mounts of the machine, which must be another one. No folder of the machine is
    mounted anywhere, so that no cleanup can reach it.
    """

    def __init__(self, folder: Path, outside: str) -> None:
        assert os.readlink("/proc/self/ns/mnt") != outside, "not in a namespace of its own"
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.home = folder / "root"
        folder.chmod(0o755)
        (folder / "state").mkdir(mode=0o700)
        self._shadow_files()
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "link", "add", "nodes", "type", "bridge")
        _run("ip", "address", "add", f"{_BRIDGE}/24", "dev", "nodes")
        _run("ip", "link", "set", "nodes", "up")
        self._start_munge()
        self._start("slurmctld", "-D", "-c")
        for number, node in enumerate(NODES, 1):
            self._start_node(node, number)
        self._wait_for_nodes()

    def _shadow_files(self) -> None:
        """Puts files of this cluster over those of the machine, in this namespace only."""
        nodes = "\n".join(
            f"NodeName={node} NodeAddr=10.31.0.{number} CPUs={_CPUS} RealMemory=8000"
            for number, node in enumerate(NODES, 1)
        )
        hosts = "".join(f"10.31.0.{n} {node}\n" for n, node in enumerate(NODES, 1))
        users = "".join(
            f"{name}:x:{number}:{number}::{self.folder / name}:/bin/bash\n"
            for number, name in enumerate(USERS, 4001)
        )
        groups = "".join(f"{name}:x:{number}:\n" for number, name in enumerate(USERS, 4001))
        _run("mount", "-t", "tmpfs", "tmpfs", "/etc/slurm")
        Path("/etc/slurm/slurm.conf").write_text(
            _CONFIGURATION.format(folder=self.folder, nodes=nodes)
        )
        for path, text in {
            "/etc/hosts": f"127.0.0.1 localhost\n{_BRIDGE} controller\n{hosts}",
            "/etc/passwd": Path("/etc/passwd").read_text() + users,
            "/etc/group": Path("/etc/group").read_text() + groups,
        }.items():
            own = self.folder / Path(path).name
            own.write_text(text)
            _run("mount", "--bind", str(own), path)
        _run("hostname", "controller")
        self.home.mkdir()
        for user in USERS:
            (self.folder / user).mkdir()
            shutil.chown(self.folder / user, user, user)

    def _start_munge(self) -> None:
        for place in ("/etc/munge", "/run/munge", "/var/log/munge", "/var/lib/munge"):
            Path(place).mkdir(exist_ok=True)
            _run("mount", "-t", "tmpfs", "tmpfs", place)
        key = Path("/etc/munge/munge.key")
        key.touch(mode=0o400)
        key.write_bytes(secrets.token_bytes(128))
        Path("/run/munge").chmod(0o755)
        Path("/etc/munge").chmod(0o700)
        self._start("munged", "--foreground", "--force")
        _wait(lambda: Path("/run/munge/munge.socket.2").exists(), "munged")

    def _start(self, *command: str, name: str = "") -> subprocess.Popen[bytes]:
        """Starts a daemon, whose log is named after it."""
        with (self.folder / f"{name or command[0]}.log").open("ab") as log:
            daemon = subprocess.Popen(command, stdout=log, stderr=log)
        self._daemons.append(daemon)
        return daemon

    def _start_node(self, node: str, number: int) -> None:
        """Starts a node: a network namespace with a cable to the bridge, and a name."""
        _run("ip", "link", "add", f"to-{node}", "type", "veth", "peer", "name", f"of-{node}")
        _run("ip", "link", "set", f"to-{node}", "master", "nodes", "up")
        ready = self.folder / f"{node}.ready"
        os.mkfifo(ready)
        script = f"""
            hostname {node}
            read < {ready}
            ip link set lo up && ip link set of-{node} name eth0 && ip link set eth0 up
            ip address add 10.31.0.{number}/24 dev eth0
            mount -t tmpfs -o mode=1777 tmpfs /dev/shm
            mount -t tmpfs -o mode=1777 tmpfs /tmp/ray
            exec slurmd -D -N {node}
        """
        unshare = ("unshare", "--net", "--uts", "--mount", "bash", "-ec", script)
        process = self._start(*unshare, name=node)
        _wait(
            lambda: os.readlink(f"/proc/{process.pid}/ns/net") != os.readlink("/proc/self/ns/net"),
            node,
        )
        _run("ip", "link", "set", f"of-{node}", "netns", str(process.pid))
        ready.write_text("\n")

    def _wait_for_nodes(self) -> None:
        def all_idle() -> bool:
            states = self.run("sinfo", "--noheader", "--format=%T", check=False).split()
            return bool(states) and set(states) == {"idle"}

        _wait(all_idle, "the nodes")

    def run(self, *command: str, user: str = "root", check: bool = True, **options: Any) -> str:
        """Runs a command as a user of the cluster; returns its output."""
        account = pwd.getpwnam(user)
        finished = subprocess.run(
            command,
            user=account.pw_uid,
            group=account.pw_gid,
            extra_groups=[],
            env=self._variables(**options.pop("variables", {})),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_DEADLINE_S,
            **options,
        )
        assert not check or finished.returncode == 0, f"{command}: {finished.stdout}"
        return finished.stdout

    def submit(
        self, script: str, folder: Path, *options: str, user: str = "root", **variables: str
    ) -> str:
        """Submits a batch script, to run in a folder; returns the number of the job."""
        command = ("sbatch", "--parsable", *options)
        printed = self.run(*command, user=user, input=script, cwd=folder, variables=variables)
        return printed.splitlines()[-1].split(";")[0]

    def wait(self, job: str, *states: str) -> dict[str, str]:
        """Waits until a job is in one of some states, COMPLETED by default; returns its fields."""
        deadline_s = time.monotonic() + _JOB_DEADLINE_S
        wanted = states or ("COMPLETED",)
        ended = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        while True:
            fields = self.show(job)
            if fields["JobState"] in wanted:
                return fields
            has_ended = fields["JobState"] in ended
            if has_ended or time.monotonic() > deadline_s:
                raise AssertionError(f"job {job} is {fields}, not {wanted}\n{self.logs()}")
            time.sleep(0.2)

    def show(self, job: str) -> dict[str, str]:
        """Returns the fields of a job; the first element's or component's, if it has several."""
        printed = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        return dict(field.partition("=")[::2] for field in printed.split())

    def logs(self) -> str:
        """Returns the logs of all jobs and daemons."""
        files = [*sorted(self.folder.glob("*.log")), *sorted(self.folder.glob("*/*/*.log"))]
        return "\n".join(f"== {file}\n{file.read_text()[-6000:]}" for file in files)

    def close(self) -> None:
        """Ends the daemons; jobs that still run end with the namespaces."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(_DEADLINE_S)

    def _variables(self, **more: str) -> dict[str, str]:
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}",
            "JAX_PLATFORMS": "cpu",
            "KERAS_BACKEND": "jax",
            "RAY_raylet_start_wait_time_s": "120",  # several nodes start at once on a few cores
            **{name: text for name, text in os.environ.items() if name.startswith(_INHERITED)},
            **more,
        }


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _wait(is_there: Any, what: str) -> None:
    deadline_s = time.monotonic() + _DEADLINE_S
    while not is_there():
        assert time.monotonic() < deadline_s, f"{what} did not start within {_DEADLINE_S} s"
        time.sleep(0.1)
