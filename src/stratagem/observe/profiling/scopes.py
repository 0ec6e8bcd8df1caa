"""Layers of a model in the metadata of compiled operations.

Keras names a scope after each layer, loss and optimizer. JAX writes the scopes into the metadata of
an operation, wrapped by its transformations: `jit(step)/transpose(jvp(model))/dense/dot_general`
is a part of the backward pass of the layer `dense`.

What a step does every few steps only has a scope that says so.
"""

from __future__ import annotations

import re
from collections import Counter
from contextlib import AbstractContextManager

import jax

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%([\w.-]+) = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(")
_CALLED = re.compile(r"calls=%([\w.-]+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_PERIOD = re.compile(r"\bsynchronized_every_(\d+)_steps\b")
_WRAPPER = re.compile(r"^(\w+)\((.*)\)$")
_FUNCTIONS = {"jit", "pjit", "pmap"}
# Scopes that JAX adds for its own transformations, and our shape of a step.
_STRUCTURE = {
    "body",
    "checkpoint",
    "closed_call",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "rematted_computation",
    "scan",
    "shard_map",
    "while",
}


def every_steps(period: int) -> AbstractContextManager[object]:
    """Returns a scope for operations of one in `period` steps."""
    return jax.named_scope(f"synchronized_every_{period}_steps")


def period_of(text: str) -> int:
    """Returns how many steps there are to one that does what an instruction says.

    Example:
        >>> period_of('op_name="jit(step)/synchronized_every_50_steps/cond"'), period_of("ROOT %a")
        (50, 1)
    """
    found = _PERIOD.search(text)
    return int(found[1]) if found else 1


def layer_of(scope: str) -> tuple[str, str]:
    """Returns the layers in a scope, joined by "/", and the pass: "forward", "backward" or "".

    Example:
        >>> layer_of("jit(_one_step)/shard_map/transpose(jvp(model))/dense/dot_general")
        ('model/dense', 'backward')
    """
    layers: list[str] = []
    wrappers: set[str] = set()
    # The last part is the primitive, except in the name of an argument.
    for part in scope.split("/")[:-1]:
        name, own = part, set[str]()
        while wrapped := _WRAPPER.match(name):
            own.add(wrapped[1])
            name = wrapped[2]
        wrappers |= own
        if name and not own & _FUNCTIONS and name not in _STRUCTURE and "(" not in name:
            layers.append(name)
    is_differentiated = "jvp" in wrappers
    phase = "backward" if "transpose" in wrappers else "forward" if is_differentiated else ""
    return "/".join(layers), phase


def instructions_of(text: str) -> dict[str, tuple[str, str]]:
    """Returns the kind of operation and the scope of each instruction of a compiled program."""
    found: dict[str, tuple[str, str]] = {}
    inside: dict[str, Counter[str]] = {}
    calls: dict[str, str] = {}
    current: Counter[str] = Counter()
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            current = inside.setdefault(begin[1], Counter())
        elif instruction := _INSTRUCTION.match(line):
            scope = _SCOPE.search(line)
            found[instruction[1]] = (instruction[2], scope[1] if scope else "")
            if scope and "/" in scope[1]:
                current[scope[1]] += 1
            if not scope and (called := _CALLED.search(line)):
                calls[instruction[1]] = called[1]
    for name, computation in calls.items():  # a fusion without a scope of its own
        if common := inside.get(computation, Counter()).most_common(1):
            found[name] = (found[name][0], common[0][0])
    return found
