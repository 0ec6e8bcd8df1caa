"""Plain numbers: runs programs in a process of their own, in which Stratagem is never imported.

python -m validation.third_party.plain_keras keras_rs_ranking numbers.npz
"""

from __future__ import annotations

import contextlib
import importlib
import sys

import numpy as np

from validation.third_party.programs.measuring import Place, run_program


def main(module_name: str, path: str) -> None:
    """Writes what each program of a module measured, under `program/quantity`."""
    programs = importlib.import_module(f"validation.third_party.programs.{module_name}").PROGRAMS
    place = Place(contextlib.nullcontext)
    numbers = {
        f"{name}/{key}": value
        for name, program in programs.items()
        for key, value in run_program(program, place).items()
    }
    if "stratagem" in sys.modules:
        raise RuntimeError("A program imports stratagem: its numbers are not plain.")
    np.savez(path, **numbers)


if __name__ == "__main__":
    main(*sys.argv[1:])
