"""Parts shared by commands: verbosity, JSON, suggestions for misspelled names."""

from __future__ import annotations

import difflib
import json
import traceback
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from stratagem import errors as exit_codes
from stratagem import logs

_Decorated = TypeVar("_Decorated", bound=Callable[..., Any])
_LEVEL = "stratagem.log_level"
_LEVELS = ("info", "debug")


class Commands(click.Group):
    """Group whose commands take `-v` and `-q`, and whose misspelled commands get a suggestion."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Adds a command, with the options that all commands share."""
        is_complete = any(one.name == "verbose" for one in cmd.params)  # of a group with two names
        if not isinstance(cmd, click.Group) and not is_complete:
            cmd.params += [_verbose_option(), _quiet_option()]
        super().add_command(cmd, name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Finds a command; raises UsageError with the closest name for an unknown one."""
        name = args[0]
        is_known = name.startswith("-") or self.get_command(ctx, name) is not None
        if not is_known and not ctx.resilient_parsing:
            ctx.fail(f"No such command {name!r}.{suggestion(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command; exits as shells do after Ctrl-C, and shows causes with `-v`."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise SystemExit(exit_codes.INTERRUPTED) from None
        except click.ClickException as error:
            logs.reset()  # click closes no context whose arguments are wrong
            if chosen_log_level(ctx) in _LEVELS and error.__cause__ is not None:
                cause = "".join(traceback.format_exception(error.__cause__))
                click.echo(cause, err=True, nl=False)
            raise


def json_option(command: _Decorated) -> _Decorated:
    """Adds `--json`, for a command that prints nothing but JSON on stdout then."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")(
        command
    )


def print_json(value: object) -> None:
    """Prints a value as JSON."""
    click.echo(json.dumps(value, indent=2))


def suggestion(name: str, names: Iterable[str]) -> str:
    """Returns " Did you mean 'devices'?" for a misspelled name, or "" if none is close."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def chosen_log_level(context: click.Context | None = None) -> str | None:
    """Returns the log level that `-v` or `-q` chose, or None without them."""
    return (context or click.get_current_context()).meta.get(_LEVEL)


def _verbose_option() -> click.Option:
    return click.Option(
        ["-v", "--verbose"],
        count=True,
        expose_value=False,
        callback=_choose_verbose,
        help="Show progress, and tracebacks of errors; -vv for more.",
    )


def _quiet_option() -> click.Option:
    return click.Option(
        ["-q", "--quiet"],
        is_flag=True,
        expose_value=False,
        callback=_choose_quiet,
        help="Show no warnings and no progress.",
    )


def _choose_verbose(context: click.Context, _: click.Parameter, count: int) -> None:
    if count:
        _choose(context, _LEVELS[min(count, len(_LEVELS)) - 1])


def _choose_quiet(context: click.Context, _: click.Parameter, is_quiet: bool) -> None:
    if is_quiet:
        _choose(context, "error")
        context.with_resource(warnings.catch_warnings())
        warnings.simplefilter("ignore")


def _choose(context: click.Context, level: str) -> None:
    if _LEVEL in context.meta:
        raise click.UsageError("-v and -q contradict each other: omit one of them.", context)
    context.meta[_LEVEL] = level
    logs.show_logs(level)
    context.call_on_close(logs.reset)
