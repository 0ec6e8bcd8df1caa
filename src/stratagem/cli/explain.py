"""`stratagem explain`: the page of an error code, or its row of the table of codes, offline."""

from __future__ import annotations

import difflib
import posixpath
import re
from pathlib import Path

import click

from stratagem.cli.commands import json_option, print_json

# In a wheel beside the package's modules (pyproject.toml puts them there), else in the checkout.
_FOLDERS = (
    Path(__file__).parents[1] / "error_pages",
    Path(__file__).parents[3] / "docs" / "reference" / "errors",
)
# A row of the table: the code, which links to its page if it has one, the meaning, the fix.
_ROW = re.compile(r"^\| \[?(SG\d{3})\b[^|]* \| ([^|]+) \| (.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(?:#[^)\s]*)?\)")


def _complete_code(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    return [code for code in load_pages() if code.startswith(incomplete.upper())]


@click.command("explain")
@json_option
@click.argument("code", required=False, shell_complete=_complete_code)
def command(code: str | None, *, as_json: bool) -> None:
    """Explain an error code such as SG204.

    Errors whose cause needs more words end with a code. Without CODE, list all codes.
    """
    pages = load_pages()
    if not pages:
        raise click.ClickException("The pages of the error codes are not installed.")
    if code is None:
        if as_json:
            print_json([{"code": name, "title": _title(page)} for name, page in pages.items()])
        else:
            show(_listing())
        return
    name = code.strip().upper()
    name = f"SG{name}" if name.isdigit() else name
    if name not in pages:
        close = difflib.get_close_matches(name, pages, n=3, cutoff=0.7)
        meant = (
            f"Did you mean {' or '.join(close)}?"
            if close
            else "`stratagem explain` lists all codes."
        )
        raise click.UsageError(f"There is no error code {code!r}. {meant}")
    text = _without_links(pages[name])
    if as_json:
        print_json({"code": name, "title": _title(pages[name]), "text": text})
    else:
        show(text)


def load_pages() -> dict[str, str]:
    """Returns the Markdown of each error code, in order: its page, or else its row of the table."""
    pages: dict[str, str] = {}
    for code, title, fix in _ROW.findall(_table()):
        page = _folder() / f"{code}.md"
        row = f"# {code}: {title}\n\n{fix}\n"
        pages[code] = page.read_text(encoding="utf-8") if page.is_file() else row
    return pages


def _folder() -> Path:
    return next((folder for folder in _FOLDERS if folder.is_dir()), _FOLDERS[-1])


def _table() -> str:
    """Returns the page with the table of all codes; "" if it is not installed."""
    path = _folder() / "index.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _title(page: str) -> str:
    """Returns the heading of a page without its code."""
    return page.partition("\n")[0].partition(": ")[2]


def _listing() -> str:
    """Returns a Markdown list of the codes and titles, below the headings of the table."""
    lines = ["# Error codes", ""]
    for line in _table().splitlines():
        if line.startswith("## "):
            lines += ["", line, ""]
        elif row := _ROW.match(line):
            lines.append(f"* {row[1]}: {row[2]}")
    return "\n".join([*lines, "", "`stratagem explain CODE` shows the fix."])


def _without_links(page: str) -> str:
    """Replaces each link by its text and the page of the documentation, or by the error code."""

    def replaced(match: re.Match[str]) -> str:
        text, target = match.groups()
        if target.startswith(("http:", "https:")) or text == Path(target).stem:
            return text if text == Path(target).stem else match[0]
        return f"{text} ({posixpath.normpath(f'docs/reference/errors/{target}')})"

    return _LINK.sub(replaced, page)


def show(text: str) -> None:
    """Prints Markdown: rendered in a terminal with colors, otherwise as it is."""
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console()
    if console.is_terminal and not console.no_color:
        console.print(Markdown(text))
    else:
        click.echo(text.rstrip())
