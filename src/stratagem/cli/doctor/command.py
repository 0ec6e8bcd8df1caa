"""Commands about this machine: `stratagem doctor`, `env`, `config` and `devices`."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import click

from stratagem import environment, settings
from stratagem.cli.commands import json_option, print_json

_POSITIVE = click.FloatRange(min=0, min_open=True)
_BYTES_PER_GIB = 2**30


@click.command("doctor")
@json_option
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
@click.option(
    "--self-test",
    "has_self_test",
    is_flag=True,
    help="Also train a small model under every strategy, in about a minute, and compare the "
    "weights with NumPy's.",
)
@click.option(
    "--cluster",
    "is_cluster",
    is_flag=True,
    help="Examine all hosts of the cluster, and the network between them. Run it on each of them.",
)
@click.option(
    "--wait",
    "wait_s",
    type=_POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds to wait for all hosts.",
)
@click.option(
    "--limit",
    "limit_s",
    type=_POSITIVE,
    default=3.0,
    show_default=True,
    help="Seconds to wait for a connection between hosts.",
)
def doctor_command(
    *,
    as_json: bool,
    strict: bool,
    has_self_test: bool,
    is_cluster: bool,
    wait_s: float,
    limit_s: float,
) -> None:
    """Find problems of this machine or cluster, and their fixes.

    Checks versions, devices, limits, settings and the cluster. Exit codes: 0 if training can start,
    1 for errors.
    """
    from stratagem.cli.doctor import selftest
    from stratagem.cli.doctor.cluster import examine_clusters, examine_together
    from stratagem.cli.doctor.findings import show
    from stratagem.cli.doctor.machine import examine

    survey = None
    if is_cluster:
        survey, made = examine_together(wait_s, limit_s)
    else:
        made = examine(check_cluster=examine_clusters)
    if has_self_test:
        made = itertools.chain(made, selftest.check_cases())
    findings = list(made) if as_json else show(made)
    if as_json:
        values = [dataclasses.asdict(finding) for finding in findings]
        fields = {"findings": values, "survey": survey and dataclasses.asdict(survey)}
        print_json(fields if is_cluster else values)
    fatal = {"error", "warning"} if strict else {"error"}
    raise SystemExit(int(any(finding.level in fatal for finding in findings)))


@click.command("env")
@json_option
def env_command(*, as_json: bool) -> None:
    """Describe this environment for a bug report.

    Names, addresses and secrets are left out.
    """
    from stratagem.cli.doctor.cluster import examine_clusters
    from stratagem.cli.doctor.findings import describe, facts
    from stratagem.cli.doctor.machine import (
        counted_devices,
        examine,
        installed_versions,
        probe_devices,
        variables_of_user,
    )

    probe = probe_devices()
    known = facts(
        installed_versions(),
        counted_devices(probe.devices),
        examine(probe, examine_clusters),
        variables_of_user(),
    )
    if as_json:
        print_json(known)
    else:
        click.echo(describe(known))


@click.command("config")
@json_option
def config_command(*, as_json: bool) -> None:
    """Show all settings, and which are set by a variable."""
    found: list[dict[str, Any]] = []
    for setting in settings.SETTINGS.values():
        try:
            value = settings.read(setting.name)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        is_set = environment.get(setting.variable) is not None
        found.append({"variable": setting.variable, "value": value, "is_set": is_set})
    if as_json:
        print_json(found)
        return
    for one in found:
        value = "" if one["value"] is None else one["value"]
        click.echo(f"{one['variable']}={value}{'' if one['is_set'] else '  (default)'}")


@click.command("devices")
@json_option
def devices_command(*, as_json: bool) -> None:
    """Show the local devices, and the replicas of each strategy."""
    try:
        environment.require_jax_choice()
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    found = local_devices_and_strategies()
    if as_json:
        print_json(found)
    else:
        _show_devices(found)


def local_devices_and_strategies() -> dict[str, Any]:
    """Returns the devices of this process, and those of each strategy; starts JAX's backend.

    Devices have the names that strategies accept, such as "gpu:0". No strategy is made, because
    that would load Keras.
    """
    import jax

    from stratagem.devices.finding import local_devices

    devices = local_devices()
    platforms = [device.platform for device in devices]
    names = [f"{one}:{platforms[:place].count(one)}" for place, one in enumerate(platforms)]
    used = {f'OneDeviceStrategy("{names[0]}")': names[:1], "MirroredStrategy()": names}
    return {
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "process_index": jax.process_index(),
        "num_processes": jax.process_count(),
        "devices": [
            {"name": name, "kind": device.device_kind, "memory_bytes": _memory_bytes(device)}
            for name, device in zip(names, devices, strict=True)
        ],
        "strategies": [
            {"strategy": call, "num_replicas": len(of_it), "devices": of_it}
            for call, of_it in used.items()
        ],
    }


def _memory_bytes(device: Any) -> int | None:
    """Returns the memory that JAX may use on a device; None where it is not counted, as on CPU."""
    return (device.memory_stats() or {}).get("bytes_limit")


def _show_devices(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(
        f"JAX {found['jax']} on {found['backend']}, "
        f"process {found['process_index']} of {found['num_processes']}"
    )
    table = Table("device", "kind", "memory", title="Local devices", title_justify="left")
    for one in found["devices"]:
        memory = one["memory_bytes"]
        shown = "-" if memory is None else f"{memory / _BYTES_PER_GIB:.1f} GiB"
        table.add_row(one["name"], one["kind"], shown)
    console.print(table)
    table = Table("strategy", "replicas", "devices", title="Strategies", title_justify="left")
    first = found["devices"][0]["name"]
    table.add_row("none (default)", "1", f"{first}, or JAX's default device")
    for one in found["strategies"]:
        table.add_row(one["strategy"], str(one["num_replicas"]), ", ".join(one["devices"]))
    console.print(table)
    if len(found["devices"]) == 1:
        console.print('More replicas on one CPU: MirroredStrategy(["cpu:0", "cpu:1"])', style="dim")
