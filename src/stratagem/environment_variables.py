"""Environment variables that set defaults of this library."""

from __future__ import annotations

import dataclasses
from typing import Any

from stratagem.setting_kinds import (
    COUNT,
    COUNT_OR_NONE,
    LOG_FORMATS,
    LOG_LEVELS,
    SECONDS,
    SWITCH,
    TEXT,
    SettingKind,
    choice,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentVariable:
    """One environment variable that sets a default; `meaning` is its line in the documentation."""

    name: str
    default: Any
    parse: SettingKind
    meaning: str


VARIABLES = {
    "run_eagerly": EnvironmentVariable(
        name="STRATAGEM_RUN_EAGERLY",
        default=False,
        parse=SWITCH,
        meaning="Run replica functions op by op, with one thread per replica, for debugging.",
    ),
    "filter_tracebacks": EnvironmentVariable(
        name="STRATAGEM_FILTER_TRACEBACKS",
        default=True,
        parse=SWITCH,
        meaning="Hide frames of this library in tracebacks.",
    ),
    "log_level": EnvironmentVariable(
        name="STRATAGEM_LOG_LEVEL",
        default="auto",
        parse=choice("a log level", LOG_LEVELS, any_case=True),
        meaning="Lowest level of log records shown; `auto`: INFO on the leader, else WARNING.",
    ),
    "log_format": EnvironmentVariable(
        name="STRATAGEM_LOG_FORMAT",
        default="text",
        parse=choice("a log format", LOG_FORMATS),
        meaning="Format of log records on stderr: `text`, or `json` for one object per line.",
    ),
    "foreign_lines": EnvironmentVariable(
        name="STRATAGEM_FOREIGN_LINES",
        default=False,
        parse=SWITCH,
        meaning="Show log lines of Gloo and of JAX's coordination service, for debugging.",
    ),
    "program_cache_size": EnvironmentVariable(
        name="STRATAGEM_PROGRAM_CACHE_SIZE",
        default=256,
        parse=COUNT,
        meaning="Number of compiled replica functions that a strategy caches.",
    ),
    "cache_dir": EnvironmentVariable(
        name="STRATAGEM_CACHE_DIR",
        default="~/.cache/stratagem",
        parse=TEXT,
        meaning="Folder for measurements and compiled programs that are cached for later runs.",
    ),
    "compilation_cache_bytes": EnvironmentVariable(
        name="STRATAGEM_COMPILATION_CACHE_BYTES",
        default=2 * 2**30,
        parse=COUNT_OR_NONE,
        meaning="Maximum size of the compiled programs in the cache folder; 0 stores none.",
    ),
    "keep_freed_memory": EnvironmentVariable(
        name="STRATAGEM_KEEP_FREED_MEMORY",
        default=True,
        parse=SWITCH,
        meaning="Keep memory that a step on CPU devices has freed for the next step (glibc only).",
    ),
    "fast_convolutions": EnvironmentVariable(
        name="STRATAGEM_FAST_CONVOLUTIONS",
        default=True,
        parse=SWITCH,
        meaning="Compute convolutions on CPU devices in the form that is fastest there.",
    ),
    "join_timeout_s": EnvironmentVariable(
        name="STRATAGEM_JOIN_TIMEOUT_S",
        default=300.0,
        parse=SECONDS,
        meaning="How long the processes of a cluster wait for each other at startup.",
    ),
    "peer_timeout_s": EnvironmentVariable(
        name="STRATAGEM_PEER_TIMEOUT_S",
        default=30.0,
        parse=SECONDS,
        meaning="How long a process may be silent before the others give up.",
    ),
    "stuck_timeout_s": EnvironmentVariable(
        name="STRATAGEM_STUCK_TIMEOUT_S",
        default=120.0,
        parse=SECONDS,
        meaning="How long a live process may make no progress while others wait for it.",
    ),
    "barrier_timeout_s": EnvironmentVariable(
        name="STRATAGEM_BARRIER_TIMEOUT_S",
        default=300.0,
        parse=SECONDS,
        meaning="How long processes wait for each other at a barrier.",
    ),
    "checkpoint_timeout_s": EnvironmentVariable(
        name="STRATAGEM_CHECKPOINT_TIMEOUT_S",
        default=3600.0,
        parse=SECONDS,
        meaning="How long an evaluator waits for the next checkpoint.",
    ),
    "save_timeout_s": EnvironmentVariable(
        name="STRATAGEM_SAVE_TIMEOUT_S",
        default=1800.0,
        parse=SECONDS,
        meaning="How long processes wait for another to read or write a checkpoint.",
    ),
    "client_timeout_s": EnvironmentVariable(
        name="STRATAGEM_CLIENT_TIMEOUT_S",
        default=60.0,
        parse=SECONDS,
        meaning="How long a job that ends with its client runs while the client is silent.",
    ),
    "num_spares": EnvironmentVariable(
        name="STRATAGEM_NUM_SPARES",
        default=0,
        parse=COUNT_OR_NONE,
        meaning="How many of the last processes of an elastic group wait to replace lost ones.",
    ),
    "jobs_port": EnvironmentVariable(
        name="STRATAGEM_JOBS_PORT",
        default=8265,
        parse=COUNT,
        meaning="Port on which the leader's server accepts jobs of clients.",
    ),
    "input_service": EnvironmentVariable(
        name="STRATAGEM_INPUT_SERVICE",
        default="",
        parse=TEXT,
        meaning="Address of the input service of this run, `HOST:PORT`.",
    ),
    "upload_limit_bytes": EnvironmentVariable(
        name="STRATAGEM_UPLOAD_LIMIT_BYTES",
        default=100 * 2**20,
        parse=COUNT,
        meaning="Maximum size of the files that a client sends with its program.",
    ),
    "pod_grace_s": EnvironmentVariable(
        name="STRATAGEM_POD_GRACE_S",
        default=30.0,
        parse=SECONDS,
        meaning="The pod's `terminationGracePeriodSeconds`: seconds from SIGTERM to SIGKILL.",
    ),
    "secret_file": EnvironmentVariable(
        name="STRATAGEM_SECRET_FILE",
        default="",
        parse=TEXT,
        meaning="File of mode 0600 with the secret of the run, if `STRATAGEM_SECRET` is not set.",
    ),
    "allow_unauthenticated": EnvironmentVariable(
        name="STRATAGEM_ALLOW_UNAUTHENTICATED",
        default=False,
        parse=SWITCH,
        meaning="Run on several hosts without a secret: strangers on the network can join.",
    ),
    "handshake_timeout_s": EnvironmentVariable(
        name="STRATAGEM_HANDSHAKE_TIMEOUT_S",
        default=10.0,
        parse=SECONDS,
        meaning="How long a new connection may take to prove the secret, and then to say hello.",
    ),
    "max_handshakes": EnvironmentVariable(
        name="STRATAGEM_MAX_HANDSHAKES",
        default=256,
        parse=COUNT,
        meaning="Connections of a port that may prove the secret at once; the oldest is closed.",
    ),
    "max_handshakes_per_address": EnvironmentVariable(
        name="STRATAGEM_MAX_HANDSHAKES_PER_ADDRESS",
        default=64,
        parse=COUNT,
        meaning="The same limit for the connections from one address.",
    ),
    "tls_dir": EnvironmentVariable(
        name="STRATAGEM_TLS_DIR",
        default="",
        parse=TEXT,
        meaning="Folder with `tls.crt`, `tls.key` and `ca.crt`, to encrypt connections of hosts.",
    ),
    "tpu_platform": EnvironmentVariable(
        name="STRATAGEM_TPU_PLATFORM",
        default="tpu",
        parse=choice(
            "a platform for TPUStrategy",
            ("tpu", "cpu"),
            '"tpu", or "cpu" to try a TPU program on this machine.',
        ),
        meaning="With `cpu`, CPU devices stand in for the chips of a TPU, to try a program.",
    ),
}
