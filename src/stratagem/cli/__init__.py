"""The `stratagem` command.

This file declares the commands and loads nothing heavy, so `--help` is instant and never grabs an
accelerator. The code of each command is imported when it is called.
"""

from __future__ import annotations

import click

from stratagem.cli.commands import Commands
from stratagem.cli.doctor.command import (
    config_command,
    devices_command,
    doctor_command,
    env_command,
)
from stratagem.cli.explain import command as explain_command
from stratagem.cli.manifests.rendering import kubernetes_group, slurm_group
from stratagem.cli.migrate.command import command as migrate_command
from stratagem.cli.runs import goodput_command, profile_command, report_command, watch_command
from stratagem.cli.scripts import launch_command, plan_command
from stratagem.cli.server import input_service_command, secret_command, server_command

__all__ = ["main"]


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stratagem", prog_name="stratagem")
def main() -> None:
    """Distributed training for Keras 3 on JAX."""


main.add_command(config_command)
main.add_command(devices_command)
main.add_command(doctor_command)
main.add_command(env_command)
main.add_command(input_service_command)
main.add_command(launch_command)
main.add_command(plan_command)
main.add_command(profile_command)
main.add_command(secret_command)
main.add_command(server_command)
main.add_command(watch_command)
main.add_command(report_command)
main.add_command(goodput_command)
main.add_command(explain_command)
main.add_command(migrate_command)
main.add_command(kubernetes_group)
main.add_command(Commands("k8s", kubernetes_group.commands, help="Short for kubernetes."))
main.add_command(slurm_group)
