"""Records what commands print: a table of commands, and the pages and pictures that show them.

python docs/generate_tool_pages.py               # all; those with hosts need root and iproute2
python docs/generate_tool_pages.py doctor env    # some
python docs/generate_tool_pages.py --list

A page has the text in the block below the line `<!-- recorded: NAME -->`. The name of the
machine and its paths are left out. To add a command, add a row, and that line with an empty text
block to its page.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PICTURES = DOCS / "pictures"
WIDTH = 100
LIMIT_S = 300
# What terminals show of progress is erased in the end.
_ERASE_LINE, _SHOW_CURSOR = "\x1b[2K", "\x1b[?25h"


@dataclasses.dataclass(frozen=True)
class Row:
    """One command, and where its output goes.

    Args:
        command: as a user types it.
        page: page with the recorded text, relative to `docs/`; None for a picture alone.
        picture: True to draw `pictures/tool_NAME.svg`.
        variables: environment of the command.
        files: files in its folder, by name.
        num_hosts: hosts on which it runs at once; the output is that of the first.
        code: exit code.
    """

    command: str
    page: str | None = "how_to/doctor.md"
    picture: bool = False
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_hosts: int = 1
    code: int = 0


ROWS = {
    "doctor": Row("stratagem doctor"),
    "doctor_problems": Row(
        "stratagem doctor train.py",
        picture=True,
        variables={
            "JAX_DEBUG_NANS": "true",
            "STRATAGEM_PEER_TIMOUT_S": "60",
            "XLA_FLAGS": "--xla_gpu_make_it_fast=true",
            "TF_CONFIG": '{"cluster": {"worker": ["host0:2222", "host1"]}, '
            '"task": {"type": "worker", "index": 0}}',
        },
        files={"train.py": "import keras\nimport stratagem as sg\n"},
        code=1,
    ),
    "doctor_run": Row("stratagem doctor --run"),
    "doctor_cluster": Row(
        "stratagem doctor --cluster --plot cluster.png", picture=True, num_hosts=3
    ),
    "env": Row("stratagem env"),
    "test": Row("stratagem test --only mirrored --only sharded --only multi_worker"),
    "devices": Row("stratagem devices", variables={"JAX_NUM_CPU_DEVICES": "2"}),
    "explain": Row("stratagem explain SG501"),
}


def record(row: Row) -> tuple[str, bytes | None]:
    """Runs a row's command; returns what it prints, with colors, and the picture it draws."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in row.files.items():
            Path(folder, name).write_text(text)
        home = Path(folder, "home")
        home.mkdir()
        if row.num_hosts == 1:
            printed = _finished([_start(row.command, folder, dict(row.variables))], row.code)
        else:
            printed = _on_hosts(row, folder)
        drawn = Path(folder, "cluster.png")
        return redact(printed, folder), drawn.read_bytes() if drawn.exists() else None


def redact(text: str, folder: str) -> str:
    """Returns a text without paths of this machine, its name, and lines that were erased."""
    text = text.rpartition(_ERASE_LINE)[2].replace(_SHOW_CURSOR, "")
    for private, public in (
        (f"{folder}/home", "~"),
        (f"{folder}/", ""),
        (sys.prefix, ".venv"),
        (str(ROOT), "."),
        (socket.gethostname(), "HOST"),
    ):
        text = text.replace(private, public)
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def headings(text: str) -> list[str]:
    """Returns the lines of an output that are the same on all machines: headings, without digits.

    Args:
        text: recorded text, or what a command prints, with or without colors.
    """
    lines = [Text.from_ansi(line).plain.rstrip() for line in text.splitlines()]
    # The first cell of a row in Markdown is its heading.
    lines = [line.split("|")[1].strip() if line.startswith("| ") else line for line in lines]
    return [line for line in lines if re.match(r"(?![│┃┏┡├└|])[^\s\d][^\d]*$", line)]


def recorded(page: str, name: str) -> str | None:
    """Returns the text that a page has recorded of a command, or None."""
    found = re.search(_block(name), page)
    return found and found["text"].rstrip("\n")


def insert(page: str, name: str, text: str) -> str:
    """Returns a page with a newly recorded text."""
    return re.sub(_block(name), lambda found: f"{found['head']}{text}\n```", page)


def svg(command: str, printed: str) -> str:
    """Returns a picture of a terminal with a command and its output."""
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        console.print(f"[bold]$ {command}[/bold]")
        console.print(Text.from_ansi(printed))
        return console.export_svg(title="stratagem", unique_id=re.sub(r"\W+", "_", command))


def main() -> None:
    """Records the rows that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*ROWS, []])
    parser.add_argument("--list", action="store_true", help="print the table")
    arguments = parser.parse_args()
    for name, row in ROWS.items():
        if arguments.names and name not in arguments.names:
            continue
        print(f"{name}: {row.command}", flush=True)
        if arguments.list:
            continue
        printed, drawn = record(row)
        if row.page is not None:
            path = DOCS / row.page
            plain = "\n".join(line.rstrip() for line in Text.from_ansi(printed).plain.splitlines())
            path.write_text(insert(path.read_text(), name, plain))
        if row.picture:
            (PICTURES / f"tool_{name}.svg").write_text(svg(row.command, printed))
        if drawn is not None:
            (PICTURES / f"tool_{name}.png").write_bytes(drawn)


def _block(name: str) -> str:
    return rf"(?P<head><!-- recorded: {name} -->\n+```text\n)(?P<text>(?:(?!```)[^\n]*\n)*?)```"


def _start(
    command: str, folder: str, variables: dict[str, str], prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Starts a command in a folder, without the settings of this machine's user."""
    own = ("KERAS_", "JAX_", "XLA_", "STRATAGEM_", "TF_CONFIG")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    program, *words = command.split()
    assert program == "stratagem"
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "stratagem", *words],
        cwd=folder,
        env={
            **kept,
            "PYTHONPATH": str(ROOT / "src"),
            "HOME": f"{folder}/home",
            "FORCE_COLOR": "1",
            "COLUMNS": str(WIDTH),
            "TERM": "xterm-256color",
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _finished(processes: Sequence[subprocess.Popen[str]], code: int) -> str:
    """Returns what the first process printed; all must end with the exit code."""
    printed = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    codes = {process.returncode for process in processes}
    assert codes == {code}, (codes, printed)
    return printed[0]


def _on_hosts(row: Row, folder: str) -> str:
    """Runs a command on several hosts of one machine, as the workers of a cluster."""
    with _hosts(row.num_hosts) as machines:
        addresses = [f"host{index}:2222" for index in range(row.num_hosts)]
        processes = [
            _start(
                row.command,
                folder,
                {
                    **row.variables,
                    "TF_CONFIG": json.dumps(
                        {
                            "cluster": {"worker": addresses},
                            "task": {"type": "worker", "index": index},
                        }
                    ),
                },
                command,
            )
            for index, command in enumerate(machines)
        ]
        return _finished(processes, row.code)


@contextlib.contextmanager
def _hosts(count: int) -> Generator[list[list[str]]]:
    """Makes network namespaces that have the names host0, host1 and so on."""
    sys.path.insert(0, str(ROOT))
    from tests.multiprocess.namespaces import hosts

    with hosts(count, "10.85.0") as machines, contextlib.ExitStack() as stack:
        known = "127.0.0.1 localhost\n" + "".join(
            f"{address.partition(':')[0]} host{index}\n"
            for index, (_, address) in enumerate(machines)
        )
        for command, _ in machines:
            folder = Path("/etc/netns") / command[-1]
            folder.mkdir(parents=True)
            stack.callback(folder.rmdir)
            (folder / "hosts").write_text(known)
            stack.callback((folder / "hosts").unlink)
        yield [command for command, _ in machines]


if __name__ == "__main__":
    main()
