"""Whether all processes are about to run the same program, asked before its first step.

Programs that differ would exchange what does not belong together, or wait for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from stratagem.execution.analysis.replication import inner_jaxprs
from stratagem.group import current_group
from stratagem.messages import explain

__all__ = ["agree_on_program", "name_of"]


def name_of(fn: Callable[..., Any]) -> str:
    """Returns what a function is called in messages.

    Args:
        fn: the function.
    """
    return str(getattr(fn, "__qualname__", None) or type(fn).__qualname__)


def agree_on_program(name: str, jaxpr: ClosedJaxpr) -> None:
    """Compares a program with those of the other processes.

    Args:
        name: of the function.
        jaxpr: what it was traced to, variables among its arguments and results.

    Raises:
        RuntimeError: another process is about to run another one.
    """
    group = current_group()
    assert group is not None
    digest = hashlib.sha256()
    for line in _lines(jaxpr.jaxpr):
        digest.update(line.encode())
    own = {
        "arguments": str([str(aval) for aval in jaxpr.in_avals]),
        "results": str([str(aval) for aval in jaxpr.out_avals]),
        "operations": digest.hexdigest()[:12],
    }
    told = group.exchange(f"the program of {name}", own)
    for label, other in zip(group.identity.labels, told, strict=True):
        for what, value in other.items():
            if value != told[0][what]:
                raise RuntimeError(
                    explain(
                        f"{label} and {group.identity.labels[0]} made different programs of "
                        f"{name}: their {what} are {value} and {told[0][what]}.",
                        expected="one program on all processes.",
                        fix="see where the functions or their arguments part: a condition on the "
                        "process, a batch of another size, an option that only one was given.",
                    )
                )


def _lines(jaxpr: Jaxpr) -> Iterator[str]:
    """What happens in a program, without names and addresses, which differ between processes."""
    for eqn in jaxpr.eqns:
        constants = [str(atom.val) for atom in eqn.invars if isinstance(atom, Literal)]
        yield f"{eqn.primitive.name} {constants} {[str(var.aval) for var in eqn.outvars]}"
        for value in eqn.params.values():
            for inner in inner_jaxprs(value):
                yield from _lines(inner)
