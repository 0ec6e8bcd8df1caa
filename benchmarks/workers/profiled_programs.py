"""What programs exchanged while they ran: their collectives, seen by the profiler."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from benchmarks.collectives import collectives_in

__all__ = ["Program", "ProgramRuns", "dumped_programs", "exchanged_bytes", "profiled"]

# What XLA calls a copy of an array of one device to another; JAX 0.12 adds how it is done.
_COPY = "CopyToMemorySpace"


@dataclasses.dataclass(frozen=True, order=True)
class Program:
    """A program that ran.

    Args:
        name: of its module.
        number: of its module in what XLA dumps; 0 from JAX 0.12 on, which does not tell.
    """

    name: str
    number: int


@dataclasses.dataclass
class ProgramRuns:
    """What a profile tells of the time that it was taken in.

    Args:
        operations: by program and operation how often each device ran it.
        num_copies: arrays, or parts of one, that went from one device to another.
    """

    operations: dict[tuple[Program, str], Counter[int]] = dataclasses.field(
        default_factory=lambda: defaultdict(Counter)
    )
    num_copies: int = 0

    @property
    def programs(self) -> list[Program]:
        """The programs that ran."""
        return sorted({program for program, _ in self.operations})

    def read(self, profile: Any) -> None:
        """Adds what a profile has.

        Args:
            profile: a `jax.profiler.ProfileData` of XLA:CPU.
        """
        with warnings.catch_warnings():
            # Types of the profile have no module, which Python 3.13 warns of.
            warnings.simplefilter("ignore", DeprecationWarning)
            for plane in profile.planes:
                for line in plane.lines:
                    for event in line.events:
                        self._note(event.name, dict(event.stats))

    def _note(self, name: str, told: dict[str, Any]) -> None:
        self.num_copies += name.startswith(_COPY)
        if "hlo_op" in told and "program_id" in told:
            program = Program(str(told["hlo_module"]), int(told["program_id"]))
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


def dumped_programs(folder: Path, programs: Iterable[Program]) -> dict[Program, str]:
    """Returns the optimised HLO of programs.

    Args:
        folder: where XLA has dumped them.
        programs: which.

    Raises:
        RuntimeError: there is none, or it is not known which.
    """
    texts: dict[Program, str] = {}
    for program in programs:
        number = f"{program.number:04d}" if program.number else "*"
        paths = folder.glob(f"module_{number}.{program.name}.*after_optimizations.txt")
        found = [path.read_text(encoding="utf-8") for path in paths]
        # Those of small operations have one name; they exchange nothing.
        several = [text for text in found if collectives_in(text)]
        if not found or len(several) > 1:
            raise RuntimeError(
                f"{len(several)} of {len(found)} programs in {folder} that are called "
                f"{program.name} exchange something. Expected: one that is called so, or one that "
                "exchanges something."
            )
        texts[program] = (several or found)[0]
    return texts


def exchanged_bytes(runs: ProgramRuns, programs: Mapping[Program, str]) -> dict[str, int]:
    """Returns the bytes that programs exchanged, all devices together, by "program: kind".

    Args:
        runs: what was profiled.
        programs: the optimised HLO of each program that ran.

    Raises:
        RuntimeError: an exchange was not seen, or not as often by each of its devices.
    """
    exchanged: Counter[str] = Counter()
    for program in runs.programs:
        for collective in collectives_in(programs[program]):
            seen = runs.operations.get((program, collective.name), Counter())
            if not seen or len(set(seen.values())) > 1:
                raise RuntimeError(
                    f"{collective.name} of {program.name} was seen {dict(seen)} times by its "
                    "devices. Expected: each as often, and at least once. The profile is "
                    "incomplete."
                )
            num_runs = next(iter(seen.values()))
            moved = num_runs * collective.moved_bytes(len(seen))
            exchanged[f"{program.name}: {collective.kind}"] += moved
    return dict(exchanged)
