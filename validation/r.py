"""Runs the page about R by R, which it installs from Debian's packages where it is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

_TESTS = ("tests/docs/test_r.py", "tests/multiprocess/test_walk_through.py")


def _has_reticulate() -> bool:
    if shutil.which("Rscript") is None:
        return False
    command = ("Rscript", "-e", "library(reticulate)")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def main() -> int:
    """Installs, which only root may, and runs the tests."""
    if not _has_reticulate():
        if shutil.which("apt-get") is None:
            print("No R with reticulate found, and no apt-get to install it.", file=sys.stderr)
            return 1
        apt = (*(() if os.geteuid() == 0 else ("sudo",)), "apt-get", "--quiet")
        subprocess.run((*apt, "update"), check=True)
        packages = ("r-base-core", "r-cran-reticulate")
        install = (*apt, "install", "--yes", "--no-install-recommends", *packages)
        subprocess.run(install, check=True)
    command = (sys.executable, "-m", "pytest", "-m", "slow", *_TESTS, *sys.argv[1:])
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
