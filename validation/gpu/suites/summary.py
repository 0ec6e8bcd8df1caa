"""Summary of a record: counts of each suite, reasons of skips, failures by their message."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from validation.gpu.suites.files import suite_of
from validation.gpu.suites.recording import NOT_REACHED

_ORDER = {"failed": 2, "skipped": 1, "passed": 0}
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]?\d+)?")


def read_record(path: Path) -> list[dict[str, Any]]:
    """Returns the entries of a record; a last line that was cut off is left out."""
    entries: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def results(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the result of each test or file: the worst of its phases."""
    found: dict[str, dict[str, Any]] = {}
    for entry in entries:
        if entry["kind"] == "warning":
            continue
        known = found.get(entry["name"])
        if known is None or _ORDER[entry["outcome"]] > _ORDER[known["outcome"]]:
            found[entry["name"]] = dict(entry)
    return found


def summarize(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the summary as JSON's types."""
    tests = results(entries)
    suites: dict[str, Counter[str]] = defaultdict(Counter)
    skips: Counter[str] = Counter()
    failures: dict[str, list[str]] = defaultdict(list)
    for name, result in tests.items():
        outcome = result["outcome"]
        reason = result.get("reason", "")
        if outcome == "skipped":
            outcome = "not reached" if reason == NOT_REACHED else "skipped"
            skips[_first_line(reason)] += 1
        elif outcome == "failed":
            failures[_pattern(reason)].append(name)
        elif result.get("allocations"):
            suites[suite_of(name)]["passed, computed on the GPU"] += 1
        suites[suite_of(name)][outcome] += 1
    slowest = sorted(tests.values(), key=lambda one: -one.get("duration_s", 0.0))[:25]
    warned = Counter(_first_line(one["text"]) for one in entries if one["kind"] == "warning")
    return {
        "total": dict(sum(suites.values(), Counter())),
        "suites": {suite: dict(counts) for suite, counts in suites.items()},
        "skips": dict(skips.most_common()),
        "failures": dict(sorted(failures.items(), key=lambda item: -len(item[1]))),
        "slowest": [[one["name"], one.get("duration_s", 0.0)] for one in slowest],
        "warnings": dict(warned.most_common(30)),
    }


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


def _pattern(reason: str) -> str:
    """Returns the first line of a message with its numbers replaced, to count like failures."""
    return _NUMBERS.sub("N", _first_line(reason))


def to_text(summary: Mapping[str, Any]) -> str:
    """Returns a summary to read."""
    lines = ["Total: " + _counts(summary["total"]), ""]
    lines += [f"{suite}: {_counts(counts)}" for suite, counts in summary["suites"].items()]
    lines += ["", f"Failures, by message ({len(summary['failures'])}):"]
    for message, names in summary["failures"].items():
        lines.append(f"  {len(names)} x {message}")
        lines += [f"      {name}" for name in names[:4]]
    for title, key in (("Skipped", "skips"), ("Warnings", "warnings")):
        lines += ["", f"{title}:"]
        lines += [f"  {count} x {text}" for text, count in summary[key].items()]
    lines += ["", "Slowest:"]
    lines += [f"  {duration_s:7.1f} s  {name}" for name, duration_s in summary["slowest"]]
    return "\n".join(lines) + "\n"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "nothing"


def write_summary(folder: Path) -> dict[str, Any]:
    """Writes summary.json, summary.txt, failed.txt, alone.txt and failures.log beside a record."""
    entries = read_record(folder / "record.jsonl")
    summary = summarize(entries)
    failed = [one for one in results(entries).values() if one["outcome"] == "failed"]
    texts = [f"=== {one['name']}\n{one.get('text', one.get('reason', ''))}\n" for one in failed]
    (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    (folder / "summary.txt").write_text(to_text(summary), encoding="utf-8")
    names = "".join(f"{one['name']}\n" for one in failed)
    (folder / "failed.txt").write_text(names, encoding="utf-8")
    alone = [
        f"{one['name']}\n"
        for one in results(entries).values()
        if one["outcome"] == "passed" and "in place of several" in (one.get("lookups") or ())
    ]
    (folder / "alone.txt").write_text("".join(alone), encoding="utf-8")
    (folder / "failures.log").write_text("\n".join(texts), encoding="utf-8")
    return summary
