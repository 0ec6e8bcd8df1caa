"""Prints how often examples are seen: `python -m tests.unit.input.service [FAULT ...]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.unit.input.service.fault_ledger import FAULTS, MODES, count_visits


def main() -> None:
    print("| part | " + " | ".join(map(str, MODES)) + " |")
    print("|---" * (1 + len(MODES)) + "|")
    for fault in sys.argv[1:] or FAULTS:
        cells: list[str] = []
        for mode in MODES:
            with tempfile.TemporaryDirectory() as folder:
                counts, error = count_visits(Path(folder), mode, fault)
            text = ", ".join(f"{counts[times]} x {times}" for times in sorted(counts))
            cells.append(text + (f": {error.splitlines()[0]}" if error else ""))
        print(f"| {fault} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
