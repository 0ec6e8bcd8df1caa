"""Records what commands print: a table of commands, and the pages and pictures that show them.

python docs/generate_tool_pages.py               # all; those with hosts need root and iproute2
python docs/generate_tool_pages.py goodput plan  # some
python docs/generate_tool_pages.py --list

A page has the text in the block below the line `<!-- recorded: NAME -->`. The name of the
machine and its paths are left out. To add a command, add a row, and that line with an empty text
block to its page.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

DOCS = Path(__file__).parent
ROOT = DOCS.parent
PICTURES = DOCS / "pictures"
WIDTH = 100
LIMIT_S = 900
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
        prepare: makes more files in its folder.
        left_out: pattern of the text that the page leaves out.
        shows_errors: True to record stderr, too.
        module: module that must be installed.
    """

    command: str
    page: str | None = "how_to/doctor.md"
    picture: bool = False
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    num_hosts: int = 1
    code: int = 0
    prepare: Callable[[Path], None] | None = None
    left_out: str = ""
    shows_errors: bool = False
    module: str = "stratagem"


def _block_of(page: str, word: str) -> str:
    """Returns the block of Python of a page that has a word."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)
    (block,) = (block for block in blocks if word in block)
    return block


def _make_run(folder: Path) -> None:
    """Writes the events of ten minutes in which a worker is killed twice."""
    sys.path.insert(0, str(ROOT))
    from tests.unit.observe.runs import long_run, write

    write(folder / "runs/digits", long_run(2))


def _make_profile(folder: Path) -> None:
    """Runs the first program of the page about profiles."""
    program = _block_of("how_to/profiling.md", "tempfile.mkdtemp()")
    program = program.replace("tempfile.mkdtemp()", '"profile"')
    variables = {"PYTHONPATH": str(ROOT / "src"), "JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-c", program]
    subprocess.run(command, cwd=folder, env=os.environ | variables, check=True, timeout=LIMIT_S)


_PLAN = "stratagem plan examples/plan/train_transformer.py --target 8xH100"
_LARGE = "--width 4096 --blocks 32"
_PLANNED: dict[str, Any] = {
    "page": "how_to/plan.md",
    "files": {
        "examples/plan/train_transformer.py": Path(
            ROOT, "examples/plan/train_transformer.py"
        ).read_text()
    },
    "module": "jax_plugins.xla_cuda12",
}
ROWS = {
    "doctor_problems": Row(
        "stratagem doctor",
        picture=True,
        variables={
            "JAX_DEBUG_NANS": "true",
            "STRATAGEM_PEER_TIMOUT_S": "60",
            "XLA_FLAGS": "--xla_gpu_make_it_fast=true",
            "TF_CONFIG": '{"cluster": {"worker": ["host0:2222", "host1"]}, '
            '"task": {"type": "worker", "index": 0}}',
        },
        code=1,
    ),
    "doctor_cluster": Row(
        "stratagem doctor --cluster",
        variables={"STRATAGEM_SECRET": 32 * "s", "JAX_PLATFORMS": "cpu"},
        num_hosts=3,
    ),
    "launch": Row(
        "stratagem launch --workers 2 --max-restarts 1 train.py",
        page="clusters/launch.md",
        files={"train.py": _block_of("clusters/launch.md", "STRATAGEM_RESTART_COUNT")},
        shows_errors=True,
    ),
    "misspelled": Row("stratagem device", page="reference/cli.md", code=2, shows_errors=True),
    "goodput": Row(
        "stratagem goodput runs/digits --plot goodput.png",
        page="how_to/goodput.md",
        prepare=_make_run,
    ),
    "profile": Row(
        "stratagem profile profile --top 5", page="how_to/profiling.md", prepare=_make_profile
    ),
    "plan": Row(_PLAN, left_out="- Compiled for.*", **_PLANNED),
    "plan_too_large": Row(f"{_PLAN} {_LARGE}", left_out="Memory per device.*", **_PLANNED),
}


def can_record(row: Row) -> bool:
    """Returns True if what a row needs is here."""
    sys.path.insert(0, str(ROOT))
    from tests.multiprocess.namespaces import can_make_hosts

    with contextlib.suppress(ModuleNotFoundError):
        if importlib.util.find_spec(row.module) is not None:
            return row.num_hosts == 1 or can_make_hosts()
    return False


def record(row: Row) -> tuple[str, bytes | None]:
    """Runs a row's command; returns what it prints, with colors, and the picture it draws."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in row.files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if row.prepare is not None:
            row.prepare(Path(folder))
        home = Path(folder, "home")
        home.mkdir()
        if row.num_hosts == 1:
            printed = _finished([_start(row, folder, dict(row.variables))], row.code)
        else:
            printed = _on_hosts(row, folder)
        drawn = next(Path(folder).glob("*.png"), None)
        return redact(printed, folder), drawn and drawn.read_bytes()


def shown(row: Row, printed: str) -> str:
    """Returns the text for the page: without colors, and without what the row leaves out."""
    plain = "\n".join(line.rstrip() for line in Text.from_ansi(printed).plain.splitlines())
    return re.sub(row.left_out, "", plain, flags=re.DOTALL).rstrip("\n")


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
            path.write_text(insert(path.read_text(), name, shown(row, printed)))
        if row.picture:
            (PICTURES / f"tool_{name}.svg").write_text(svg(row.command, printed))
        if drawn is not None:
            (PICTURES / f"tool_{name}.png").write_bytes(drawn)


def _block(name: str) -> str:
    return rf"(?P<head><!-- recorded: {name} -->\n+```text\n)(?P<text>(?:(?!```)[^\n]*\n)*?)```"


def _start(
    row: Row, folder: str, variables: dict[str, str], prefix: Sequence[str] = ()
) -> subprocess.Popen[str]:
    """Starts a row's command in a folder, without the settings of this machine's user."""
    own = ("KERAS_", "JAX_", "XLA_", "STRATAGEM_", "TF_CONFIG", "TPU_")
    kept = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    program, *words = row.command.split()
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
        stderr=subprocess.STDOUT if row.shows_errors else subprocess.DEVNULL,
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
                row,
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
