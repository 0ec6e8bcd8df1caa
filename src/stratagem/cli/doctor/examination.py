"""The whole examination, in the order in which problems hide each other."""

from __future__ import annotations

import ctypes.util
from collections.abc import Iterator, Mapping
from pathlib import Path

from stratagem import environment
from stratagem.cli.doctor import accelerators, clusters, machine, services, settings, versions
from stratagem.cli.doctor.finding import Finding
from stratagem.folders import programs_folder

_INITIAL_VARIABLES = Path("/proc/self/environ")


def examine(
    script: Path | None = None,
    probe: accelerators.Probe | None = None,
    *,
    has_cluster: bool = True,
) -> Iterator[Finding]:
    """Examines this machine; yields findings as they are made.

    Args:
        script: training script whose imports are checked, too.
        probe: devices that JAX found; by default JAX is started.
        has_cluster: False leaves out the cluster, for a survey of all of its hosts.
    """
    installed = versions.installed_versions()
    # The full set is needed to check requirements, such as ml_dtypes.
    required = versions.examined_requirements()
    yield from versions.check_requirements(required, versions.versions_for(required, installed))
    yield from versions.check_extras(required.get("stratagem", ()), installed)
    yield from versions.check_plugins(installed, required.get("jax", ()))
    variables = variables_of_user()
    yield from settings.check_settings(variables)
    if script is not None:
        yield from settings.check_script(script, settings.keras_backend(variables))
    yield from machine.check_machine(machine.read_limits())
    driver = accelerators.gpu_driver()
    yield from accelerators.check_gpu_driver(driver, installed)
    probe = probe or accelerators.probe_devices()
    yield from accelerators.check_devices(probe, installed, has_gpu=driver is not None)
    finds_nccl = ctypes.util.find_library("nccl") is not None
    nccl = versions.installed_versions(accelerators.NCCL_PACKAGES)
    yield from accelerators.check_nccl(
        probe.devices,
        {**installed, **nccl},
        has_driver=driver is not None,
        finds_library=finds_nccl,
    )
    if has_cluster:
        yield from clusters.examine_clusters()
    yield from services.check_ray(variables, installed)
    yield from _examine_caches(variables, installed)


def _examine_caches(
    variables: Mapping[str, str], installed: Mapping[str, str]
) -> Iterator[Finding]:
    cache = Path(environment.read("cache_dir")).expanduser()
    yield from services.check_cache(cache)
    variable = "JAX_COMPILATION_CACHE_DIR"
    chosen = variables.get(variable)
    if "://" not in str(chosen):
        yield from services.check_compilation_cache(
            Path(chosen) if chosen else programs_folder(cache),
            installed.get("jaxlib"),
            versions.installed_at_s("jaxlib"),
            variable if chosen else None,
        )


def variables_of_user() -> dict[str, str]:
    """Returns the environment without the Keras backend that importing this package selected."""
    variables = environment.snapshot()
    try:
        initial = _INITIAL_VARIABLES.read_bytes()
    except OSError:
        return variables
    if variables.get("KERAS_BACKEND") == "jax" and b"KERAS_BACKEND=" not in initial:
        del variables["KERAS_BACKEND"]
    return variables
