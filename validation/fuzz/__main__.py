"""`python -m validation.fuzz --frames 1000000`: inputs for each parser, guided by coverage."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table

_MOST_BYTES = 4096
_MOST_MEMORY_MIB = 2048
_MOST_S = 10


@click.command()
@click.option("--frames", type=int, default=1_000_000, show_default=True, help="Of each parser.")
@click.option("--only", default="", help="Parsers whose name contains this.")
@click.option("--seed", type=int, default=0, help="0 for another one each time.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("runs/fuzz"))
def main(frames: int, only: str, seed: int, output: Path) -> None:
    """Sends bytes to the parsers of sockets until one crashes, hangs, or grows."""
    names = [name for name in _names() if only in name]
    output.mkdir(parents=True, exist_ok=True)
    table = Table(
        "parser", "inputs", "a second", "code blocks", "memory at 10 % (MiB)", "at the end"
    )
    failed: list[str] = []
    for name in track(names, "Fuzzing", console=Console(stderr=True)):
        log = output / f"{name}.log"
        code, took_s = _run(name, frames, seed, log)
        table.add_row(name, *_summary(log.read_text(errors="replace"), frames, took_s))
        if code:
            failed.append(f"{name}: exit code {code}, see {log}")
    Console().print(table)
    if failed:
        raise SystemExit("\n".join(failed))


def _names() -> list[str]:
    from validation.fuzz.parsers import PARSERS

    return list(PARSERS)


def _run(name: str, frames: int, seed: int, log: Path) -> tuple[int, float]:
    from validation.fuzz.parsers import PARSERS

    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        for number, data in enumerate(PARSERS[name][1]):
            (corpus / str(number)).write_bytes(data)
        options = [
            f"-runs={frames}",
            f"-seed={seed}",
            f"-max_len={_MOST_BYTES}",
            f"-rss_limit_mb={_MOST_MEMORY_MIB}",
            f"-timeout={_MOST_S}",
            f"-artifact_prefix={log.parent}/{name}-",
            "-print_final_stats=1",
        ]
        begin_s = time.monotonic()
        with log.open("wb") as written:
            command = [
                sys.executable,
                "-m",
                "validation.fuzz.one_parser",
                name,
                str(corpus),
                *options,
            ]
            code = subprocess.run(command, stdout=written, stderr=written, check=False).returncode
        return code, time.monotonic() - begin_s


def _summary(text: str, frames: int, took_s: float) -> tuple[str, ...]:
    """Reads libFuzzer's lines, such as "#8192 pulse cov: 90 ft: 91 exec/s: 40 rss: 90Mb"."""
    lines = re.findall(r"^#(\d+)\s.*?cov: (\d+).*?rss: (\d+)Mb", text, re.MULTILINE)
    done = re.search(r"stat::number_of_executed_units: (\d+)", text)
    count = int(done[1]) if done else int(lines[-1][0]) if lines else 0
    early = next((rss for number, _, rss in lines if int(number) >= frames / 10), "?")
    coverage, last = (lines[-1][1], lines[-1][2]) if lines else ("?", "?")
    return f"{count:,}", f"{count / took_s:,.0f}", coverage, early, last


if __name__ == "__main__":
    main()
