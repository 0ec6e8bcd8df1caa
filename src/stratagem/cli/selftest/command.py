"""`stratagem test`: self-test of an installation."""

from __future__ import annotations

import dataclasses

import click

from stratagem.cli.commands import chosen_log_level, json_option, print_json


@click.command("test")
@click.option("--only", multiple=True, help="Run these cases only, such as mirrored; repeatable.")
@json_option
def command(only: tuple[str, ...], *, as_json: bool) -> None:
    """Test this installation: train under every strategy.

    Compares the weights of a small model with gradient descent in NumPy. Takes about a
    minute on two cores. Exit codes: 0 if all that can run passed, 1 if one failed.
    """
    from stratagem.cli.selftest.cases import CASES, run_case, run_shown

    names = [case.name for case in CASES]
    if unknown := sorted(set(only) - set(names)):
        raise click.UsageError(f"No such case: {', '.join(unknown)}. There are {', '.join(names)}.")
    cases = [case for case in CASES if not only or case.name in only]
    if as_json:
        outcomes = [run_case(case) for case in cases]
    else:
        outcomes = run_shown(cases, shows_progress=chosen_log_level() != "error")
    if as_json:
        rows = [{**dataclasses.asdict(one), "passed": one.passed} for one in outcomes]
        print_json(rows)
    raise SystemExit(int(any(not one.passed and not one.is_skipped for one in outcomes)))
