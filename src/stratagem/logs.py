"""Log records and warnings of this library: the process that shows them, and their form.

Every module logs to a logger of its own name, below the logger `stratagem`. One handler there
writes to stderr while the program has no handlers of its own, and passes records on to them once
it has. Problems that a user should mend are warnings of Python's `warnings`.
"""

from __future__ import annotations

import copy
import datetime
import html
import io
import json
import logging
import re
import sys
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from stratagem import environment, settings
from stratagem.settings import SETTINGS

if TYPE_CHECKING:
    from rich.table import Table

_ROOT = "stratagem"
# The handler chooses the records, since this process may become a worker after the import. Another
# level of our logger is the user's.
_ALL = 1
_LINE, _TIME = "%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"
_LINES = logging.Formatter(_LINE, _TIME)
_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


class _LogState:
    """Choices of this process, and its task once it has joined a group: name and process id."""

    level: str | None = None
    format: str | None = None
    task: tuple[str, int] | None = None


def attach_handler() -> None:
    """Attaches the handler to this library's logger, once."""
    logger = logging.getLogger(_ROOT)
    if _handler not in logger.handlers:
        logger.addHandler(_handler)
        logger.propagate = False  # the handler passes records on
        if logger.level == logging.NOTSET:
            logger.setLevel(_ALL)


def show_logs(level: str | None = None, format: str | None = None) -> None:
    """Chooses level and format for this process; None leaves the choice as it was.

    Raises ValueError for another word.
    """
    if level is not None:
        _LogState.level = SETTINGS["log_level"].kind.parse(level)
    if format is not None:
        _LogState.format = SETTINGS["log_format"].kind.parse(format)


def reset() -> None:
    """Returns to the level and the format of the environment."""
    _LogState.level = _LogState.format = None


def log_level() -> str:
    """Returns the word for the lowest level shown."""
    return _LogState.level or _read("log_level")


def log_format() -> str:
    """Returns the format."""
    return _LogState.format or _read("log_format")


def set_task(name: str, process_id: int) -> None:
    """Names this process, such as "worker 3", once it has joined its group."""
    _LogState.task = name, process_id


def warn_on_one_worker(
    message: str, category: type[Warning] = UserWarning, *, stacklevel: int
) -> None:
    """Warns as `warnings.warn` does, on one worker: all workers would warn alike."""
    if _is_first_of_its_kind():
        warnings.warn(message, category, stacklevel=stacklevel + 1)


def announce(logger: logging.Logger, text: str) -> None:
    """Writes a status line to stderr, or logs it if the program has handlers that show it.

    Unlike records, status lines need no setting to be seen; the level `error` hides them.
    """
    root = logging.getLogger()
    if root.handlers and _lowest_level(logger.name, unset=root.level) <= logging.INFO:
        logger.info("%s", text)
    elif log_level() == "error":
        return
    elif log_format() == "json":
        _handler.write(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))
    else:
        print(text, file=sys.stderr, flush=True)


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records to stderr, or passes them to the handlers of the program."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record of at least the chosen level."""
        root = logging.getLogger()
        others = [one for one in logging.getLogger(_ROOT).handlers if one is not self]
        unset = root.level if root.handlers else _level_of_task()
        if record.levelno < _lowest_level(record.name, unset=unset):
            return
        for handler in root.handlers:
            if handler not in others and record.levelno >= handler.level:
                handler.handle(record)
        if not others and not root.handlers:
            self.write(record)

    def write(self, record: logging.LogRecord) -> None:
        """Writes a record to stderr."""
        self.stream = sys.stderr  # a program may replace it
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """Returns a line of text or of JSON."""
        return _as_json(record) if log_format() == "json" else _as_text(record)


_handler = LogHandler()


def _lowest_level(name: str, *, unset: int) -> int:
    """Returns the lowest level shown of a logger; `unset` without a choice for it."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None and logger.name != _ROOT:
        if logger.level:
            return logger.level
        logger = logger.parent
    level = logging.getLogger(_ROOT).level
    if level not in (_ALL, logging.NOTSET):
        return level
    return _LEVELS.get(log_level(), unset)


def _level_of_task() -> int:
    return logging.INFO if _leads() else logging.WARNING


def _task_name() -> str | None:
    """Returns a name such as "worker 3", or None without a cluster."""
    if _LogState.task is not None:
        return _LogState.task[0]
    task = _configured_task()
    return None if task is None else f"{task.type} {task.number}"


def _leads() -> bool:
    """Returns True for the leader of the cluster, and for an evaluator, which works alone."""
    if _LogState.task is not None:
        return _LogState.task[1] == 0
    task = _configured_task()
    return task is not None and (
        task.type in ("chief", "evaluator")
        or (task.type == "worker" and task.number == 0 and not task.has_chief)
    )


def _is_first_of_its_kind() -> bool:
    """Returns True for one task of each type, and without a cluster."""
    if _LogState.task is not None:
        return _LogState.task[1] == 0
    task = _configured_task()
    return task is None or task.number == 0


class _ConfiguredTask(NamedTuple):
    """Task of this process in TF_CONFIG."""

    type: str
    number: int
    has_chief: bool


def _configured_task() -> _ConfiguredTask | None:
    """Returns the task in TF_CONFIG, or None without a valid one."""
    try:
        config = json.loads(environment.lookup("TF_CONFIG") or "{}")
        task = config["task"]
        return _ConfiguredTask(str(task["type"]), int(task["index"]), "chief" in config["cluster"])
    except (KeyError, TypeError, ValueError):
        return None


def _read(setting: str) -> str:
    try:
        return settings.read(setting)
    except ValueError as error:  # a wrong word must not stop training, nor `stratagem doctor`
        warnings.warn(str(error), RuntimeWarning, stacklevel=2)
        return SETTINGS[setting].default


def _as_text(record: logging.LogRecord) -> str:
    name = _task_name()
    # The launcher shows the name before each line.
    if name is None or environment.lookup("STRATAGEM_RESTART_COUNT") is not None:
        return _LINES.format(record)
    with_name = _LINE.replace("%(message)", f"{name}: %(message)")
    return logging.Formatter(with_name, _TIME).format(record)


def _as_json(record: logging.LogRecord) -> str:
    time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
    fields: dict[str, str | None] = {
        "time": time.isoformat(timespec="milliseconds"),
        "level": record.levelname,
        "logger": record.name,
        "task": _task_name(),
        "message": record.getMessage(),
    }
    if record.exc_info:
        fields["exception"] = _LINES.formatException(record.exc_info)
    return json.dumps(fields, ensure_ascii=False)


# Lines and tables of an object, as text for a terminal and as HTML for a notebook. Rich is imported
# where it is used: it took 70 of the 105 ms of `import stratagem`.

_WIDTH = 110
_BYTES_PER_GIB = 2**30
_BYTES_PER_MIB = 2**20


def size_text(num_bytes: float, *, least: float = 0.1) -> str:
    """Formats a size: "740 B", "12.5 MiB", "4.00 GiB".

    `least` is the smallest number of MiB or GiB that is not written in the next smaller unit.

    Example:
        >>> size_text(740), size_text(12.5 * 2**20)
        ('740 B', '12.5 MiB')
    """
    if num_bytes >= _BYTES_PER_GIB * least:
        return f"{num_bytes / _BYTES_PER_GIB:.2f} GiB"
    if num_bytes >= _BYTES_PER_MIB * least:
        return f"{num_bytes / _BYTES_PER_MIB:.1f} MiB"
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes >= 1000 else f"{num_bytes:.0f} B"


def new_table(title: str | None, left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """Returns an empty table with columns of text, then columns of numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def as_text(parts: Sequence[str | Table], *, width: int = _WIDTH) -> str:
    """Returns lines and tables as plain text, without colors."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    written = io.StringIO()
    console = Console(
        file=written,
        width=width,
        color_system=None,
        force_jupyter=False,
        markup=False,  # brackets are text
        emoji=False,
    )
    for part in parts:
        if isinstance(part, Table) and part.title:  # rich would wrap it to the table's width
            console.print(Text(str(part.title)))
            part = copy.copy(part)
            part.title = None
        console.print(Text(part) if isinstance(part, str) else part)
    lines = (line.rstrip() for line in written.getvalue().splitlines())
    return "\n".join(lines).strip("\n")


def as_html(parts: Sequence[str | Table]) -> str:
    """Returns lines and tables as HTML without scripts or colors of its own.

    The notebook's theme, light or dark, sets the colors.
    """
    written = "".join(
        f"<div>{html.escape(part)}</div>" if isinstance(part, str) else _table_html(part)
        for part in parts
        if part != ""  # an empty line of the text
    )
    return f'<div class="stratagem">{written}</div>'


def _table_html(table: Table) -> str:
    columns = table.columns
    aligned = [f' style="text-align:{column.justify}"' for column in columns]
    cells = [[_plain(cell) for cell in column.cells] for column in columns]
    heads = [_plain(column.header) for column in columns]
    head = "".join(f"<th{a}>{text}</th>" for a, text in zip(aligned, heads, strict=True))
    rows = [
        "".join(f"<td{a}>{text}</td>" for a, text in zip(aligned, row, strict=True))
        for row in zip(*cells, strict=True)
    ]
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    title = f"<div><b>{_plain(table.title)}</b></div>" if table.title else ""
    shown = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f"{title}<table>{shown}<tbody>{body}</tbody></table>"


def _plain(cell: object) -> str:
    return html.escape(str(getattr(cell, "plain", cell)))


# Detection of a notebook, and text that a notebook can show.

# Colors and bold; every other sequence moves a cursor that a notebook does not have.
_STYLE = re.compile(r"\x1b\[[\d;:]*m")
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # control sequences
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # titles, links and other strings
    r"|\x1b[ -/]*[0-~]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


def notebook_display() -> Any:
    """Returns the module `IPython.display` in the kernel of a notebook; otherwise None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return sys.modules.get("IPython.display") if hasattr(shell, "kernel") else None


def printable(line: str) -> str:
    r"""Removes control characters, except tabs and the sequences for colors.

    Example:
        >>> printable("\x1b[2K\x1b[32m50%\x1b[0m\x08\x1b]0;title\x07")
        '\x1b[32m50%\x1b[0m'
    """
    line = _SEQUENCE.sub(lambda match: match[0] if _STYLE.fullmatch(match[0]) else "", line)
    return _CONTROL.sub("", line)


def plain_text(line: str) -> str:
    """Removes colors and all other control characters."""
    return _CONTROL.sub("", _SEQUENCE.sub("", line)).replace("\x1b", "")


# `dir` of public objects: what completion offers in a notebook.


class PublicDir:
    """Base of classes whose `dir` lists public names only; other names can still be read."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not name.startswith("_")]
