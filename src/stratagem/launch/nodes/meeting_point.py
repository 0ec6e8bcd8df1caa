"""Number of nodes, rank of this one and rendezvous: from the options, Slurm or Kubernetes."""

from __future__ import annotations

import dataclasses
import socket

from stratagem import environment
from stratagem.cluster.addresses import join_address, split_address
from stratagem.cluster.launchers import port_of_job
from stratagem.cluster.resolvers.slurm import SlurmClusterResolver
from stratagem.cluster.spec import parse_task_index
from stratagem.launch.plan.node_tasks import node_range
from stratagem.launch.plan.options import LaunchOptions
from stratagem.messages import explain

# As for torchrun.
DEFAULT_PORT = 29400


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeetingPoint:
    """Numbers of nodes, rank of this one (None if node 0 assigns it), and address of node 0."""

    least: int
    most: int
    rank: int | None
    host: str
    port: int

    @property
    def address(self) -> str:
        """The address as `host:port`."""
        return join_address(self.host, self.port)

    @property
    def is_here(self) -> bool:
        """True if this machine hosts the rendezvous: as node 0, or by the endpoint's host."""
        return _is_own_address(self.host) if self.rank is None else self.rank == 0


def find_meeting_point(options: LaunchOptions) -> MeetingPoint | None:
    """Returns how the nodes of this job meet, or None for this machine alone.

    Raises ValueError if the rank is out of range or no address of node 0 is known, RuntimeError for
    invalid variables of Slurm.
    """
    step = _slurm_step(options)
    nnodes = options.nnodes or (1 if step is None else step.most)
    least, most = node_range(nnodes)
    if most == 1:
        return None
    rank = options.node_rank
    if step is not None:
        rank = step.rank if rank is None else rank
    elif rank is None and (index := environment.lookup("JOB_COMPLETION_INDEX")) is not None:
        rank = parse_task_index(index)
    if rank is not None and rank >= most:
        raise ValueError(
            explain(
                f"node_rank={rank} is too large for {most} nodes.",
                expected=f"0 to {most - 1}.",
                fix="give each node its own --node-rank, and all the same --nnodes.",
            )
        )
    if options.rdzv_endpoint is not None:
        host, port = _endpoint(options.rdzv_endpoint)
    elif step is not None:
        host, port = step.host, step.port
    else:
        host, port = _host_of_pod(most), DEFAULT_PORT
    return MeetingPoint(least=least, most=most, rank=rank, host=host, port=port)


def _endpoint(text: str) -> tuple[str, int]:
    """Splits `host:port`; the port may be omitted."""
    # An IPv6 host is in brackets, and has colons of its own.
    has_port = ":" in text.rpartition("]")[2]
    return split_address(text if has_port else f"{text}:{DEFAULT_PORT}")


def _slurm_step(options: LaunchOptions) -> MeetingPoint | None:
    """Returns the nodes of a Slurm step with one task on each; None outside a step of several."""
    count = environment.lookup("SLURM_STEP_NUM_TASKS")
    if count in (None, "1") or environment.lookup("SLURM_PROCID") is None:
        return None
    if options.nnodes is not None and node_range(options.nnodes)[1] == 1:
        return None
    job = parse_task_index(environment.lookup("SLURM_JOB_ID") or "0")
    resolver = SlurmClusterResolver(port_base=port_of_job(job), gpus_per_node=0)
    tasks = resolver.cluster_spec().job_tasks("worker")
    addresses = [split_address(address) for address in tasks if address]
    if len({host for host, _ in addresses}) < len(addresses):
        raise ValueError(
            explain(
                f"srun started {len(addresses)} launchers, several on one node.",
                expected="one launcher per node, which starts the workers of its node.",
                fix="use srun --ntasks-per-node=1 stratagem launch --workers N; or start each "
                "worker by srun python train.py, without the launcher.",
            )
        )
    (host, port), most = addresses[0], len(addresses)
    return MeetingPoint(least=most, most=most, rank=resolver.task_id, host=host, port=port)


def _host_of_pod(most: int) -> str:
    """Returns pod 0 of an Indexed Job, whose headless service gives pods names of their own."""
    index, own = environment.lookup("JOB_COMPLETION_INDEX"), socket.getfqdn()
    name, _, domain = own.partition(".")
    if index is not None and name.endswith(f"-{index}") and domain:
        return f"{name.removesuffix(index)}0.{domain}"
    fix = "pass --rdzv-endpoint HOST:PORT, or start all nodes from one terminal with --hosts."
    if index is not None:
        fix = f"set `subdomain` of the pods to a headless service ({own} is no such name), or {fix}"
    elif environment.lookup("RAY_JOB_CONFIG_JSON_ENV_VAR") is not None:
        fix = (
            "in a Ray job use sg.ParameterServerStrategy, which places its processes itself; or "
            + fix
        )
    raise ValueError(
        explain(
            f"nnodes={most} without the address of node 0.",
            expected="rdzv_endpoint, or a Slurm step or an Indexed Job of Kubernetes.",
            fix=fix,
        )
    )


def _is_own_address(host: str) -> bool:
    """Returns True if a socket of this machine can have the address."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:
            continue
        return True
    return False
