"""Tries what Keras and JAX built last night, whatever the bounds and the locks allow.

With `--released`, the newest releases. What moved is printed before the tests; both must be well.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

# JAX's nightly builds and release candidates; pip goes on without an index that it cannot reach.
_NIGHTLY = "https://us-python.pkg.dev/ml-oss-artifacts-published/jax/simple/"
_EXTRAS = "checkpoint,clusters,data,migrate,observe,ray"
_NEWEST = ("keras-nightly", "jax", "jaxlib", "orbax-checkpoint")


def main() -> int:
    """Makes an environment for this once, and runs the compatibility tests in it."""
    nightly = () if "--released" in sys.argv else ("--extra-index-url", _NIGHTLY)
    with tempfile.TemporaryDirectory(prefix="stratagem-latest-") as folder:
        python = str(Path(folder, "environment", "bin", "python"))
        venv.create(Path(folder, "environment"), with_pip=True)

        def install(*words: str) -> None:
            pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
            subprocess.run((*pip, *words), check=True)

        install("install", "--upgrade", "pip>=25.1")  # reads groups from then on
        install("install", "--editable", f".[{_EXTRAS}]", "--group", "test")
        install("uninstall", "--yes", "keras")  # keras-nightly has the same files
        install("install", "--upgrade", "--pre", "--retries", "1", *nightly, *_NEWEST)
        listed = subprocess.run((python, "-m", "pip", "list"), capture_output=True, text=True)
        print(*(line for line in listed.stdout.splitlines() if line.startswith(_NEWEST)), sep="\n")
        names = (python, "-m", "tests.architecture.test_private_names")
        jax_backend = {**os.environ, "KERAS_BACKEND": "jax"}  # it imports Keras before us
        moved = subprocess.run(names, env=jax_backend, check=False).returncode
        tests = (python, "-m", "pytest", "--numprocesses", "3", "--dist", "loadfile")
        # What is run op by op depends little on versions.
        chosen = ("-m", "compatibility", "-k", "not eager")
        # Flags of XLA would be unknown to a newer one; each program is compiled once all the same.
        variables = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(Path(folder, "programs")),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        failed = subprocess.run((*tests, *chosen), env=variables, check=False).returncode
        return failed or moved


if __name__ == "__main__":
    sys.exit(main())
