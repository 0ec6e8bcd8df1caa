"""Options, arguments and error handling shared by the commands that render templates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import IO, Any

import click


def template_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument for a custom template."""
    return click.argument("template", required=False, type=click.File(encoding="utf-8"))(command)


def assignments_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--set`, which sets any variable of the template."""
    return click.option(
        "--set",
        "assignments",
        metavar="NAME=VALUE",
        multiple=True,
        help="Set any variable of the template; repeatable.",
    )(command)


def overrides(
    flags: Mapping[str, object | None], assignments: tuple[str, ...]
) -> dict[str, object]:
    """Merges flags and `--set` assignments such as "port=6000" into values by variable.

    A flag of None was not given. The last assignment of a variable wins. Raises UsageError for an
    assignment without "=", or a variable set both ways.
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
        raise click.UsageError(f"{twice[0]} is set by --set and by its flag: omit one of them.")
    return values | given


def template_arguments(template: IO[str] | None) -> dict[str, str]:
    """Returns the arguments `template` and `name` of a render function, if not the packaged one."""
    return {} if template is None else {"template": template.read(), "name": template.name}


@contextlib.contextmanager
def errors_as_messages() -> Generator[None]:
    """Turns invalid values and missing libraries into messages of the command."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except ImportError as error:
        raise click.ClickException(str(error)) from error
