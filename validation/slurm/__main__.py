"""Runs these tests in namespaces of their own; installs Slurm where apt can.

Everything that a test starts ends with the first process of the namespace, and every mount, cable
and address with the namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "ip", "unshare", "setpriv")
_PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge", "iproute2", "util-linux")


def main() -> int:
    if os.geteuid() != 0:
        print("make test-external NAME=slurm needs root: it makes namespaces, and installs Slurm.")
        return 1
    os.environ["PATH"] += ":/usr/sbin:/sbin"
    if not all(map(shutil.which, _PROGRAMS)):
        print("Installing", *_PACKAGES, flush=True)
        # Debian starts services as they are installed, unless a policy forbids it.
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
        apt = ("apt-get", "--quiet", "--quiet")
        install = (*apt, "install", "--yes", "--no-install-recommends", *_PACKAGES)
        for command in ((*apt, "update"), install):
            subprocess.run(command, env=environment, check=True)
    namespaces = ("--mount", "--net", "--uts", "--ipc", "--pid", "--fork", "--kill-child")
    tests = (sys.executable, "-m", "pytest", "validation/slurm", *sys.argv[1:])
    # Removed out here, where none of the mounts exist.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        environment = {
            **os.environ,
            "SLURM_TESTS_FOLDER": folder,
            "SLURM_TESTS_OUTSIDE": os.readlink("/proc/self/ns/mnt"),
        }
        # The namespaces end with this process, also if it is killed.
        tied = ("setpriv", "--pdeathsig", "KILL")
        command = (*tied, "unshare", *namespaces, "--mount-proc", *tests)
        return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
