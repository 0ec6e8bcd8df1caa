"""Local GPUs, counted without starting a JAX backend."""

from __future__ import annotations

import subprocess

from stratagem import environment
from stratagem.errors import explain

_COMMAND = ("nvidia-smi", "--list-gpus")
_TIMEOUT_S = 60


def local_gpus() -> tuple[str, ...]:
    """Returns the IDs of this host's GPUs that are visible to this process.

    These come from `CUDA_VISIBLE_DEVICES` or, if it is not set, from `nvidia-smi`; empty without
    that command. Raises RuntimeError if `nvidia-smi` fails.

    Source: TF 2.21 slurm_cluster_resolver.py, get_num_gpus.
    """
    visible = environment.visible_gpus()
    if visible is not None:
        return visible
    try:
        listed = subprocess.run(  # noqa: S603 - a constant command
            _COMMAND, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        ).stdout
    except FileNotFoundError:
        return ()
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(
            explain(
                f"{' '.join(_COMMAND)} failed: {error} {error.stdout or ''}".rstrip(),
                expected="a list of this host's GPUs.",
                fix="repair the driver, set CUDA_VISIBLE_DEVICES, or pass the number of GPUs.",
            )
        ) from error
    num_gpus = sum(line.startswith("GPU ") for line in listed.splitlines())
    return tuple(map(str, range(num_gpus)))
