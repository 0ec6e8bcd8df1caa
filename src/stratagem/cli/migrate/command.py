"""`stratagem migrate`: rewrites programs from TensorFlow's `tf.distribute`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from stratagem import errors as exit_codes
from stratagem.cli.commands import json_option, print_json
from stratagem.environment import load

if TYPE_CHECKING:
    from stratagem.cli.migrate.files import FileReport


@click.command("migrate")
@click.argument(
    "paths",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, path_type=Path),
    metavar="PATH...",
)
@click.option("--write", "writes", is_flag=True, help="Write the files instead of a diff.")
@click.option("--check", is_flag=True, help="Exit with 1 if anything changes or is left to do.")
@json_option
def command(paths: tuple[Path, ...], *, writes: bool, check: bool, as_json: bool) -> None:
    """Rewrite programs from tf.distribute and tf.keras.

    PATH is a .py or .ipynb file, or a folder. Without --write, nothing is written: a diff shows the
    changes. With --json, the summary replaces the diff. Places that need a person get a comment
    "# STRATAGEM: ..." above them.

    Exit codes: 0 if done, or with --check if nothing changes and nothing is left to do. 1 with
    --check if something changes or is left to do, and for a file that does not parse. 2 for a wrong
    option or path.
    """
    try:
        load("libcst", needed_by="stratagem migrate", install="'stratagem[migrate]'")
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    from stratagem.cli.migrate import files

    try:
        found = files.find_files(paths)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    reports: list[FileReport] = []
    for path in found:
        one = files.migrate_file(path)
        if writes and one.is_changed:
            one = files.write(one)
        reports.append(one)
        if not as_json and not writes and one.is_changed:
            files.show_diff(one)
    if as_json:
        print_json(files.as_dict(reports))
    else:
        files.show_summary(reports, written=writes)
    raise SystemExit(_exit_code(reports, check=check))


def _exit_code(reports: list[FileReport], *, check: bool) -> int:
    if any(one.error is not None for one in reports):
        return exit_codes.FAILURE
    if check and any(one.is_changed or one.marks for one in reports):
        return exit_codes.FAILURE
    return exit_codes.SUCCESS
