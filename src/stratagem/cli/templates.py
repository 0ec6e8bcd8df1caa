"""What the commands that render templates share."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator, Mapping
from typing import IO, Any

import click

__all__ = [
    "assignments_option",
    "content",
    "manifests",
    "overrides",
    "reported",
    "template_argument",
]


def manifests() -> Any:
    """Loads the room that renders and checks, when a command needs it."""
    return importlib.import_module("stratagem.manifests")


def template_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument for a template of one's own."""
    return click.argument("template", required=False, type=click.File(encoding="utf-8"))(command)


def assignments_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--set`, which sets any variable of the template."""
    return click.option(
        "--set",
        "assignments",
        metavar="NAME=VALUE",
        multiple=True,
        help="Set any variable of the template; may be given several times.",
    )(command)


def overrides(
    flags: Mapping[str, object | None], assignments: tuple[str, ...]
) -> dict[str, object]:
    """Puts together what flags and `--set` say.

    Args:
        flags: the value of each variable that has a flag; None where it was not given.
        assignments: texts such as "port=6000"; the last one wins.

    Returns:
        Values by variable.

    Raises:
        click.UsageError: an assignment without "=", or of a variable whose flag is given too.
    """
    values: dict[str, object] = {}
    for assignment in assignments:
        variable, sign, text = assignment.partition("=")
        if not sign:
            raise click.UsageError(f"--set {assignment}: expected NAME=VALUE.")
        values[variable.strip()] = text
    given = {variable: value for variable, value in flags.items() if value is not None}
    twice = sorted(values.keys() & given.keys())
    if twice:
        raise click.UsageError(f"{twice[0]} is set by --set and by its flag: leave out one.")
    return values | given


def content(template: IO[str] | None) -> dict[str, str]:
    """Returns the arguments `template` and `name` of a render function.

    Args:
        template: a template of one's own; None for the packaged one.

    Returns:
        The arguments; none for the packaged one.
    """
    return {} if template is None else {"template": template.read(), "name": template.name}


@contextlib.contextmanager
def reported() -> Generator[None]:
    """Turns what was given wrongly, and what is not installed, into messages of the command."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except ImportError as error:
        raise click.ClickException(str(error)) from error
