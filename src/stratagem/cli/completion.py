"""`stratagem completion`: script with which a shell completes commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
def command(shell: str) -> None:
    """Print a script for the completion of commands and options.

    For bash, add this line to ~/.bashrc: eval "$(stratagem completion bash)"

    For zsh, add this line to ~/.zshrc: eval "$(stratagem completion zsh)"

    For fish, write the script to ~/.config/fish/completions/stratagem.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = click.get_current_context().find_root().command
    click.echo(kind(root, {}, "stratagem", "_STRATAGEM_COMPLETE").source())
