"""Program fingerprint: checks that all processes compiled the same program.

Different programs would exchange unrelated data or deadlock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.execution.analysis.replication import inner_jaxprs
from stratagem.group.current import current_group
from stratagem.messages import explain


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the name of a function for messages."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def agree_on_program(name: str, jaxpr: ClosedJaxpr) -> None:
    """Compares a program with those of the other processes; raises RuntimeError if one differs."""
    group = current_group()
    assert group is not None
    own = {
        "arguments": str([str(aval) for aval in jaxpr.in_avals]),
        "results": str([str(aval) for aval in jaxpr.out_avals]),
        "operations": operations_digest(jaxpr),
    }
    received = group.exchange(f"the program of {name}", own)
    for label, other in zip(group.identity.labels, received, strict=True):
        for what, value in other.items():
            if value != received[0][what]:
                raise RuntimeError(
                    explain(
                        f"{label} and {group.identity.labels[0]} traced different programs for "
                        f"{name}: their {what} are {value} and {received[0][what]}.",
                        expected="the same program on all processes.",
                        fix="compare the functions and their arguments: find a condition on the "
                        "process, another batch size, or an option set on one process only.",
                        code="SG402",
                    )
                )


def operations_digest(jaxpr: ClosedJaxpr) -> str:
    """Returns a digest of the operations of a program, without names that differ by process."""
    digest = hashlib.sha256()
    for line in _lines(jaxpr.jaxpr):
        digest.update(line.encode())
    return digest.hexdigest()[:12]


def _lines(jaxpr: Jaxpr) -> Iterator[str]:
    """Yields the operations of a program, without names and addresses that differ by process."""
    for eqn in jaxpr.eqns:
        constants = [str(atom.val) for atom in eqn.invars if isinstance(atom, Literal)]
        yield f"{eqn.primitive.name} {constants} {[str(var.aval) for var in eqn.outvars]}"
        for value in eqn.params.values():
            for inner in inner_jaxprs(value):
                yield from _lines(inner)
