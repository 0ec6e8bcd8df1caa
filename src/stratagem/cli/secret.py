"""`stratagem secret`: a new secret for a run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import click


@click.command("secret")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    help="Write the secret to a new file of mode 0600, for STRATAGEM_SECRET_FILE.",
)
@click.option(
    "--telemetry",
    is_flag=True,
    help="Print the token with which Prometheus reads the metrics of a run with this secret.",
)
def command(path: Path | None, *, telemetry: bool) -> None:
    """Make a secret for the processes of a run.

    Give it to all of them, in STRATAGEM_SECRET or in a file. Nobody else may read it.
    """
    from stratagem.group.authentication.secret import find_secret, new_secret

    if telemetry:
        from stratagem.cli.watch import PURPOSE

        try:
            secret = find_secret()
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        if secret is None or path is not None:
            raise click.UsageError("--telemetry needs STRATAGEM_SECRET or its file, and no --file.")
        click.echo(secret.key(PURPOSE).hex())
        return
    if path is None:
        click.echo(new_secret())
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be created: {error.strerror}.") from error
    with contextlib.closing(os.fdopen(descriptor, "w", encoding="utf-8")) as file:
        file.write(f"{new_secret()}\n")
