"""What programs exchanged while they ran: their collectives, seen by the profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from benchmarks.collectives import collectives_in

__all__ = ["ProgramRuns", "exchanged_bytes", "profiled"]

# What XLA calls a copy of an array of one device to another.
_COPY = "CopyToMemorySpace"


@dataclasses.dataclass
class ProgramRuns:
    """What a profile tells of the time that it was taken in.

    Args:
        names: of the programs that ran, by their id.
        operations: by program and operation how often each device ran it.
        num_copies: arrays, or parts of one, that went from one device to another.
    """

    names: dict[int, str] = dataclasses.field(default_factory=dict)
    operations: dict[tuple[int, str], Counter[int]] = dataclasses.field(
        default_factory=lambda: defaultdict(Counter)
    )
    num_copies: int = 0

    def read(self, profile: Any) -> None:
        """Adds what a profile has.

        Args:
            profile: a `jax.profiler.ProfileData` of XLA:CPU.
        """
        for event in (
            one for plane in profile.planes for line in plane.lines for one in line.events
        ):
            if event.name == _COPY:
                self.num_copies += 1
                continue
            told = dict(event.stats)
            if "hlo_op" in told and "program_id" in told:
                program = int(told["program_id"])
                self.names[program] = str(told["hlo_module"])
                self.operations[program, str(told["hlo_op"])][int(told["device_ordinal"])] += 1


@contextlib.contextmanager
def profiled() -> Generator[ProgramRuns]:
    """Profiles what runs until it is left; what it returned is filled then."""
    runs = ProgramRuns()
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield runs
        for path in Path(folder).rglob("*.xplane.pb"):
            runs.read(ProfileData.from_file(str(path)))


def exchanged_bytes(runs: ProgramRuns, programs: Mapping[int, str]) -> dict[str, int]:
    """Returns the bytes that programs exchanged, all devices together, by "program: kind".

    Args:
        runs: what was profiled.
        programs: the optimised HLO of each program that ran, by its id.

    Raises:
        RuntimeError: an exchange was not seen, or not as often by each of its devices.
    """
    exchanged: Counter[str] = Counter()
    for program, name in sorted(runs.names.items()):
        for collective in collectives_in(programs[program]):
            seen = runs.operations.get((program, collective.name), Counter())
            if not seen or len(set(seen.values())) > 1:
                raise RuntimeError(
                    f"{collective.name} of {name} was seen {dict(seen)} times by its devices. "
                    "Expected: each as often, and at least once. The profile is incomplete."
                )
            num_runs = next(iter(seen.values()))
            moved = num_runs * collective.moved_bytes(len(seen))
            exchanged[f"{name}: {collective.kind}"] += moved
    return dict(exchanged)
