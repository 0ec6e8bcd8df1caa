"""Keyed tables that are saved while they train: versions are compared with the history."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from random import Random

from stratagem.errors import DataLossError
from stratagem.parameter_server.embedding.serving import Tables
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from validation.chaos.jobs import Outcome
from validation.chaos.jobs.parameter_servers import RunningServers, Settings, variables_of
from validation.chaos.sandbox import Sandbox
from validation.chaos.table_history import TableHistory, check_tables, read_table_history
from validation.chaos.table_states import Plan, read_snapshot

__all__ = ["KeyedTables", "RunningTables", "TableSettings"]

_CUT = re.compile(r"The end of the journal \S*server-(\d+)\.journal is damaged")


@dataclasses.dataclass(frozen=True)
class TableSettings(Settings):
    """Settings of a run.

    Args:
        saved: folder of the versions.
        tiers: folder of rows on disk.
        has_tiers: True if one table has rows on disk.
        seed: seed of the updates.
    """

    saved: str = ""
    tiers: str = ""
    has_tiers: bool = False
    seed: int = 0


class KeyedTables:
    """Updates of tables that admit and evict rows, while versions are saved and published."""

    name = "keyed tables"

    def start(self, sandbox: Sandbox, chance: Random) -> RunningTables:
        """Starts a run, with settings that are drawn."""
        settings = TableSettings(
            str(sandbox.work / "journals"),
            num_functions=160,
            is_durable=chance.random() < 0.5,
            journal_interval_s=chance.choice((0.2, 0.5, 1.0)),
            saved=str(sandbox.work / "saved"),
            tiers=str(sandbox.work / "tiers"),
            has_tiers=chance.random() < 0.5,
            seed=chance.randrange(2**31),
        )
        (sandbox.notes / "states").mkdir()
        return RunningTables(sandbox, settings, variables_of(sandbox, chance))


class RunningTables(RunningServers):
    """A run, whose coordinator is started again when it was killed."""

    program = "validation.chaos.programs.keyed_tables"
    settings: TableSettings

    def files(self) -> dict[str, list[Path]]:
        """Returns journals, unless rows on disk need them, and what servers write."""
        settings = self.settings
        found = {
            "entries": [Path(settings.journals)],
            "versions": [Path(settings.saved)],
            "rows on disk": [Path(settings.tiers)] * settings.has_tiers,
        }
        return found if settings.has_tiers else {**found, **super().files()}

    def _compared(self, output: str) -> Outcome:
        settings = self.settings
        final = json.loads((self.sandbox.notes / "final.json").read_text())
        cut = {int(server) for server in _CUT.findall(output)} | {*map(int, final["cut_servers"])}
        run = read_table_history(self.sandbox.notes)
        run = dataclasses.replace(run, cut_servers=frozenset(cut))
        plan = Plan(settings.seed, settings.num_functions)
        try:
            found = self._digests(plan)
        except DataLossError as error:
            return Outcome("wrong", f"torn: {error}")
        findings = list(
            map(str, check_tables(run, plan, is_durable=settings.is_durable, found=found))
        )
        findings += self._wrong_published(run, plan)
        if findings:
            return Outcome("wrong", "\n".join(findings[:20]))
        self.remove_long_folder()
        return Outcome("promised", _summary(run, final["evicted"], self.num_starts))

    def _digests(self, plan: Plan) -> dict[int, str]:
        saved = Path(self.settings.saved)
        numbers = TableVersions(saved).numbers
        return {number: read_snapshot(saved, number, plan).digest for number in numbers}

    def _wrong_published(self, run: TableHistory, plan: Plan) -> list[str]:
        """Compares what readers see with the last version that was published or rolled back to."""
        saved = Path(self.settings.saved)
        latest = TableVersions(saved).latest
        changes = [one for one in run.operations if one.kind in ("publish", "rollback")]
        last = next((one.number for one in reversed(changes) if one.number is not None), None)
        is_unsure = self.num_starts > 1 or any(one.number is None for one in changes)
        if latest is None:
            return [] if last is None else [f"published: {last} was published, and nothing is"]
        findings = [] if is_unsure or latest == last else [f"published: {latest}, and not {last}"]
        parts = read_snapshot(saved, latest, plan).parts
        with Tables(saved, poll_s=None) as tables:
            for name in tables.names:
                for part in (one for one in parts if one.table in name):
                    for key, (made, _) in part.rows.items():
                        (row,) = tables.lookup(name, [key])
                        if plan.made(part.table, key, row) != made:
                            findings.append(f"published: key {key} of {name} is another row")
        return findings


def _summary(run: TableHistory, num_evicted: int, num_starts: int) -> str:
    made: dict[str, int] = {}
    for one in run.operations:
        kind = one.kind if one.number is not None else "failed"
        made[kind] = made.get(kind, 0) + 1
    counted = ", ".join(f"{count} {kind}" for kind, count in sorted(made.items()))
    return f"{counted}; {num_evicted} evicted, {num_starts} starts"
