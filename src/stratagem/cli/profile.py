"""`stratagem profile`: summary of a trace of training steps."""

from __future__ import annotations

import json
from pathlib import Path

import click

from stratagem import environment


@click.command("profile")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--top", type=click.IntRange(0), default=10, help="Operations to show.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def command(trace: Path, top: int, *, as_json: bool) -> None:
    """Show what the time of profiled training steps was spent on.

    TRACE is the folder given to sg.profile or jax.profiler.start_trace, or an .xplane.pb file in
    it. The latest profile of each worker counts.
    """
    # Reading needs no accelerator.
    environment.set_defaults({"JAX_PLATFORMS": "cpu"})
    try:
        from stratagem.observe.profiling import read_profiles, show_profile

        summaries = read_profiles(trace)
    except (ImportError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        found = [{"trace": str(path), **one.to_dict(top)} for path, one in summaries.items()]
        click.echo(json.dumps(found, indent=2))
        return
    for path, summary in summaries.items():
        show_profile(summary, _title(path, trace), top=top)


def _title(path: Path, folder: Path) -> str:
    """Returns the part of a path that tells workers apart."""
    parts = path.relative_to(folder).parts if path != folder else ()
    return parts[0] if len(parts) > 1 and parts[0] != "plugins" else path.name
