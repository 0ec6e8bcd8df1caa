"""Jaxprs: what searches, labels, reduces, joins and evaluates them, whatever they compute.

Replication labels say which values are equal on all replicas, by a forward pass over the jaxpr: an
output may differ between replicas if an input may. Sums and gathers over replicas are equal
everywhere, the replica id differs, unknown operations may differ.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

from stratagem.devices.all_reduce import is_sum_over_replicas

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


_Label = TypeVar("_Label")

# Primitives that call a function once, and the parameter that holds it.
CALLS = {
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # closed_call since JAX 0.12
    "jit": "jaxpr",
    "remat2": "jaxpr",
}

# Primitives that compute each element of their results from the same elements of their inputs.
ELEMENTWISE = frozenset(
    [
        *("abs", "acos", "acosh", "add", "and", "asin", "asinh", "atan", "atan2", "atanh"),
        *("bitcast_convert_type", "cbrt", "ceil", "clamp", "conj", "convert_element_type", "copy"),
        *("copy_p", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2"),
        *("expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log"),
        *("log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or"),
        *("polygamma", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n"),
        *("shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh"),
        *("sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor"),
    ]
)


# What a jaxpr contains.


def variables_in(atoms: Iterable[Var | Literal]) -> list[Var]:
    """Returns the variables among atoms, without the literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def shape_of(atom: Var | Literal) -> tuple[int, ...]:
    """Returns the shape of a value in a jaxpr of arrays."""
    aval: Any = atom.aval
    return tuple(aval.shape)


def called_jaxpr(eqn: JaxprEqn) -> Any:
    """Returns the jaxpr, closed or not, that an operation calls once; None for others."""
    return eqn.params.get(CALLS.get(eqn.primitive.name, ""))


def inner_jaxprs(eqn: JaxprEqn) -> list[Jaxpr]:
    """Returns the jaxprs in the parameters of an operation, such as the branches of a `cond`."""
    return [one for value in eqn.params.values() for one in _jaxprs_in(value)]


def _jaxprs_in(value: object) -> list[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, Jaxpr):
        return [value]
    if isinstance(value, tuple | list):
        return [jaxpr for item in value for jaxpr in _jaxprs_in(item)]
    return []


def contains_primitive(jaxpr: Jaxpr, *names: str) -> bool:
    """True if any of the primitives occurs in a jaxpr or inside it."""
    return any(
        eqn.primitive.name in names
        or any(contains_primitive(inner, *names) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def is_by_element(eqn: JaxprEqn, *, also: Sequence[str] = ()) -> bool:
    """Returns True for an elementwise operation, or a call of elementwise operations only.

    `also` names primitives that the caller deals with.
    """
    name = eqn.primitive.name
    if name in CALLS:
        inner = inner_jaxprs(eqn)
        return all(is_by_element(one, also=also) for jaxpr in inner for one in jaxpr.eqns)
    if name == "bitcast_convert_type":  # may cut an element into several
        return shape_of(eqn.invars[0]) == shape_of(eqn.outvars[0])
    return name in ELEMENTWISE or name in also


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns the numbers of constants and carried values of a `scan`, derived from the ranks.

    JAX 0.12 renamed the parameters. A value with one row per step has one axis less inside.
    """
    inner = eqn.params["jaxpr"]
    num_carry = sum(map(_has_rank_of, eqn.outvars, inner.out_avals))
    return sum(map(_has_rank_of, eqn.invars, inner.in_avals)) - num_carry, num_carry


def _has_rank_of(atom: Any, aval: Any) -> bool:
    return atom.aval.ndim == aval.ndim


def readers_of(jaxpr: Jaxpr) -> Mapping[Any, Sequence[JaxprEqn | None]]:
    """Returns the operations that read each value; None is an output of the jaxpr."""
    readers: dict[Any, list[JaxprEqn | None]] = collections.defaultdict(list)
    for eqn, atoms in (*((eqn, eqn.invars) for eqn in jaxpr.eqns), (None, jaxpr.outvars)):
        for atom in variables_in(atoms):
            readers[atom].append(eqn)
    return readers


def labeled(
    jaxprs: Sequence[Jaxpr | ClosedJaxpr],
    inputs: Sequence[_Label],
    *,
    of_constants: Callable[..., _Label],
    of_operation: Callable[[Sequence[JaxprEqn], list[_Label]], Sequence[_Label]],
    if_unlike: _Label,
) -> list[_Label]:
    """Labels the results of jaxprs that have the same operations, in one pass over all of them.

    `inputs` are the labels of their inputs. `of_constants` gets a literal or constant of each
    jaxpr, and `of_operation` an operation of each, with the labels of its inputs. All results are
    `if_unlike` if the jaxprs turn out to differ in more than sizes and constants.
    """
    alike = [one.jaxpr if isinstance(one, ClosedJaxpr) else one for one in jaxprs]
    first = alike[0]
    counts = {(len(one.eqns), len(one.constvars), len(one.invars)) for one in alike}
    if counts != {(len(first.eqns), len(first.constvars), len(inputs))}:
        return [if_unlike] * len(first.outvars)
    known: dict[Any, _Label] = dict(zip(first.invars, inputs, strict=True))
    for atoms in zip(*(one.constvars for one in alike), strict=True):
        known[atoms[0]] = of_constants(*atoms)

    def read(atoms: Sequence[Var | Literal]) -> _Label:
        return of_constants(*atoms) if isinstance(atoms[0], Literal) else known[atoms[0]]

    for eqns in zip(*(one.eqns for one in alike), strict=True):
        if any(one.primitive is not eqns[0].primitive for one in eqns):
            return [if_unlike] * len(first.outvars)
        labels = [read(atoms) for atoms in zip(*(one.invars for one in eqns), strict=True)]
        known.update(zip(eqns[0].outvars, of_operation(eqns, labels), strict=True))
    return [read(atoms) for atoms in zip(*(one.outvars for one in alike), strict=True)]


# Parts of a jaxpr.


def leading_to(
    eqns: Sequence[JaxprEqn],
    atoms: Iterable[Var | Literal],
    stays: Callable[[JaxprEqn], bool] = lambda _: False,
) -> list[JaxprEqn]:
    """Returns the operations that compute some values, in order.

    With them come the operations that `stays` is true for, and those that these need.
    """
    wanted = set(variables_in(atoms))
    found: list[JaxprEqn] = []
    for eqn in reversed(eqns):
        if not wanted.isdisjoint(eqn.outvars) or stays(eqn):
            wanted.update(variables_in(eqn.invars))
            found.append(eqn)
    return found[::-1]


def free_variables(eqns: Sequence[JaxprEqn]) -> list[Var]:
    """Returns the variables that operations take from elsewhere, in the order of their reading."""
    made = {variable for eqn in eqns for variable in eqn.outvars}
    read = dict.fromkeys(one for eqn in eqns for one in variables_in(eqn.invars))
    return [one for one in read if one not in made]


def without_unused(
    jaxpr: Jaxpr, always_stays: Sequence[bool], *, keeps_effects: bool = True
) -> tuple[Jaxpr, list[bool]]:
    """Removes operations and inputs that no result of a jaxpr depends on.

    `always_stays` marks inputs that stay anyway; with `keeps_effects`, so do operations with side
    effects. Also returns, for each input, whether it stays.
    """
    # Not JAX's `dce_jaxpr`, which keeps the side effects of an unused operation in any case. It
    # also removes results and arguments of calls, such as those that we find again by name and
    # place.
    eqns = leading_to(jaxpr.eqns, jaxpr.outvars, _has_effect if keeps_effects else lambda _: False)
    read = {one for eqn in eqns for one in variables_in(eqn.invars)}
    read.update(variables_in(jaxpr.outvars))
    stays = [
        always or variable in read
        for variable, always in zip(jaxpr.invars, always_stays, strict=True)
    ]
    invars = [variable for variable, stay in zip(jaxpr.invars, stays, strict=True) if stay]
    return jaxpr.replace(eqns=eqns, invars=invars), stays


def _has_effect(eqn: JaxprEqn) -> bool:
    """Returns True for an operation that has another effect than to name an axis of the mesh."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def spliced(eqn: JaxprEqn, function: Callable[..., Any]) -> list[JaxprEqn]:
    """Returns operations that compute the results of another one as `function` of its inputs."""
    avals: list[Any] = [atom.aval for atom in eqn.invars]
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype, weak_type=one.weak_type) for one in avals]
    closed = jax.make_jaxpr(function)(*shapes)
    jaxpr = closed.jaxpr
    names: dict[Any, Any] = dict(zip(jaxpr.invars, eqn.invars, strict=True))
    names |= {
        variable: Literal(value, variable.aval)
        for variable, value in zip(jaxpr.constvars, closed.consts, strict=True)
    }
    names |= dict(zip(jaxpr.outvars, eqn.outvars, strict=True))
    return [
        one.replace(
            invars=[
                atom if isinstance(atom, Literal) else names.get(atom, atom) for atom in one.invars
            ],
            outvars=[names.get(variable, variable) for variable in one.outvars],
            source_info=eqn.source_info,
            ctx=eqn.ctx,
        )
        for one in jaxpr.eqns
    ]


# Evaluation of a jaxpr outside the mesh it was traced in.
#
# Values traced in a mesh are typed by it. Replaying the operations one by one lets their results
# combine with arrays on other devices.

# Parameters that give the sharding of an operation's result.
_TYPED = ("out_sharding", "sharding")


Rule = Callable[["JaxprEqn", list[Any], bool], Sequence[Any]]
"""Replaces a primitive, given its equation, its inputs, and if it is in a branch or a loop."""


def retrace(
    jaxpr: Jaxpr | ClosedJaxpr,
    inputs: Sequence[Any],
    in_place_of: Mapping[str, Callable[..., Sequence[Any]]] | None = None,
    rules: Mapping[str, Rule] | None = None,
    *,
    is_inside: bool = False,
) -> list[Any]:
    """Evaluates a jaxpr as if its operations had been written here.

    `in_place_of` maps the name of an inner function to its replacement, which returns a list.
    `rules` replace primitives by name, also in inner jaxprs. `is_inside` is True for the jaxpr of a
    branch or a loop.
    """
    consts: Sequence[Any] = ()
    if isinstance(jaxpr, ClosedJaxpr):
        consts, jaxpr = jaxpr.consts, jaxpr.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Var | Literal) -> Any:
        # Literals in the trace are typed by the mesh, too.
        return np.asarray(atom.val) if isinstance(atom, Literal) else values[atom]

    others = in_place_of or {}
    for eqn in jaxpr.eqns:
        own_inputs = [read(atom) for atom in eqn.invars]
        other = others.get(eqn.params.get("name", ""))
        if other is None:
            results = _evaluated(eqn, own_inputs, _Inner(rules or {}, is_inside))
        else:
            results = other(*own_inputs)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


class _Inner(NamedTuple):
    """The rules for jaxprs inside of an equation."""

    rules: Mapping[str, Rule]
    is_inside: bool

    def retrace(self, jaxpr: Any, inputs: Sequence[Any], *, branches: bool = True) -> list[Any]:
        return retrace(jaxpr, inputs, rules=self.rules, is_inside=self.is_inside or branches)


def _evaluated(eqn: JaxprEqn, inputs: list[Any], inner: _Inner) -> Sequence[Any]:
    name, params = eqn.primitive.name, eqn.params
    if name in inner.rules:
        return inner.rules[name](eqn, inputs, inner.is_inside)
    if (called := called_jaxpr(eqn)) is not None:
        return inner.retrace(called, inputs, branches=False)
    if name in _CONTROL:
        return _CONTROL[name](eqn, inputs, inner)
    if name == "reshard":  # changes only the type of a value in its mesh
        return inputs
    if name == "call_hi_primitive":  # since JAX 0.12: composed of other primitives
        return jax.tree.leaves(params["_prim"].expand(*inputs))
    if name != "sharding_constraint":  # others name the mesh of the trace
        params = {key: None if key in _TYPED else value for key, value in params.items()}
    results = eqn.primitive.bind(*inputs, **params)
    return results if eqn.primitive.multiple_results else [results]


def _choice(eqn: JaxprEqn, inputs: list[Any], inner: _Inner) -> Sequence[Any]:
    index, *operands = inputs
    branches = [_as_function(branch, inner) for branch in eqn.params["branches"]]
    return jax.lax.switch(index, branches, *operands)


def _as_function(jaxpr: ClosedJaxpr, inner: _Inner) -> Any:
    return lambda *inputs: inner.retrace(jaxpr, inputs)


def _loop(eqn: JaxprEqn, inputs: list[Any], inner: _Inner) -> Sequence[Any]:
    params = eqn.params
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body = inputs[:num_cond], inputs[num_cond : num_cond + num_body]
    return jax.lax.while_loop(
        lambda carry: inner.retrace(params["cond_jaxpr"], [*of_cond, *carry])[0],
        lambda carry: inner.retrace(params["body_jaxpr"], [*of_body, *carry]),
        inputs[num_cond + num_body :],
    )


def _scan(eqn: JaxprEqn, inputs: list[Any], inner: _Inner) -> Sequence[Any]:
    params = eqn.params
    body: ClosedJaxpr = params["jaxpr"]
    num_consts, num_carry = scan_counts(eqn)
    consts, rest = inputs[:num_consts], inputs[num_consts:]

    def step(carry: list[Any], parts: list[Any]) -> tuple[list[Any], list[Any]]:
        outputs = inner.retrace(body, [*consts, *carry, *parts])
        return outputs[:num_carry], outputs[num_carry:]

    carry, stacked = jax.lax.scan(
        step,
        rest[:num_carry],
        rest[num_carry:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *stacked]


_CONTROL: Mapping[str, Callable[[Any, list[Any], _Inner], Sequence[Any]]] = {
    "cond": _choice,
    "scan": _scan,
    "while": _loop,
}


_COMBINING = {
    "psum",
    "psum2",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
}
_DISTINGUISHING = {
    "axis_index",
    "reduce_scatter",
    "ppermute",
    "all_to_all",
    "infeed",
    "rng_uniform",
}


_REFERENCES = {"addupdate", "get", "swap"}
_MEETING = _COMBINING | {"reduce_scatter", "ppermute", "all_to_all"}
_OF_REPLICAS = _MEETING | {"axis_index"}


class _DivergenceError(Exception):
    """Replicas may take different branches, one of which contains a collective."""


def may_wait_for_ever(jaxpr: Jaxpr, differing_inputs: Sequence[bool]) -> bool:
    """True if a collective is in a branch or loop chosen by a value that may differ by replica."""
    if not _has_meeting_branch(jaxpr):
        return False
    try:
        differing_outputs(jaxpr, differing_inputs)
    except _DivergenceError:
        return True
    return False


def _has_meeting_branch(jaxpr: Jaxpr) -> bool:
    """True if any branch or loop contains a collective."""
    for eqn in jaxpr.eqns:
        inner = inner_jaxprs(eqn)
        if eqn.primitive.name in ("cond", "while"):
            if any(contains_primitive(one, *_MEETING) for one in inner):
                return True
        elif any(_has_meeting_branch(one) for one in inner):
            return True
    return False


def _check_meeting(eqn: JaxprEqn) -> None:
    """Raises if a branch or loop with a divergent predicate contains a collective."""
    if any(contains_primitive(one, *_MEETING) for one in inner_jaxprs(eqn)):
        raise _DivergenceError


def differing_outputs(jaxpr: Jaxpr, differing_inputs: Sequence[bool]) -> list[bool]:
    """Returns one flag per output: True if it may differ between replicas."""
    differs = differing_values(jaxpr, differing_inputs)
    return [not isinstance(atom, Literal) and differs.get(atom, False) for atom in jaxpr.outvars]


def is_replicated_work(eqn: JaxprEqn, differs: Mapping[Any, bool]) -> bool:
    """True for an operation without effects that computes the same on each replica, by itself.

    `differs` is the result of `differing_values`.
    """
    if eqn.effects or eqn.primitive.name in _OF_REPLICAS:
        return False
    if any(not isinstance(atom, Literal) and differs.get(atom, False) for atom in eqn.invars):
        return False
    return not any(contains_primitive(jaxpr, *_OF_REPLICAS) for jaxpr in inner_jaxprs(eqn))


def differing_values(jaxpr: Jaxpr, differing_inputs: Sequence[bool]) -> dict[Var, bool]:
    """Returns one flag per variable of the jaxpr: True if it may differ between replicas."""
    differs: dict[Var, bool] = dict(zip(jaxpr.invars, differing_inputs, strict=True))
    anything_differs = any(differing_inputs) or contains_primitive(jaxpr, *_DISTINGUISHING)

    def read(atom: Var | Literal) -> bool:
        return False if isinstance(atom, Literal) else differs.get(atom, False)

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name in _REFERENCES:  # the first input is the reference
            reference: Any = eqn.invars[0]
            differs[reference] = any(inputs)
            flags = [any(inputs)] * len(eqn.outvars)
        elif _is_not_followed(eqn):
            differs.update((atom, anything_differs) for atom in eqn.invars if isinstance(atom, Var))
            flags = [anything_differs] * len(eqn.outvars)
        else:
            flags = _eqn_outputs(eqn, inputs)
        differs.update(zip(eqn.outvars, flags, strict=True))
    return differs


def _is_not_followed(eqn: JaxprEqn) -> bool:
    """True for host callbacks and for references changed in an inner jaxpr."""
    return eqn.primitive.name == "io_callback" or any(
        contains_primitive(jaxpr, *_REFERENCES) for jaxpr in inner_jaxprs(eqn)
    )


def _eqn_outputs(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    name = eqn.primitive.name
    if name in _DISTINGUISHING:
        return [True] * len(eqn.outvars)
    if is_sum_over_replicas(eqn):
        return [False] * len(eqn.outvars)
    if name in _COMBINING:
        grouped = eqn.params.get("axis_index_groups") is not None
        return [grouped and any(inputs)] * len(eqn.outvars)
    if name in _CONTROL_FLOW:
        return _CONTROL_FLOW[name](eqn, inputs)
    inner = inner_jaxprs(eqn)
    if (
        len(inner) == 1
        and len(inner[0].invars) == len(inputs)
        and len(inner[0].outvars) == len(eqn.outvars)
    ):
        return differing_outputs(inner[0], inputs)
    may_differ = any(inputs) or any(contains_primitive(jaxpr, *_DISTINGUISHING) for jaxpr in inner)
    return [may_differ] * len(eqn.outvars)


def _cond_outputs(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    if inputs[0]:
        _check_meeting(eqn)
        return [True] * len(eqn.outvars)
    branches = [differing_outputs(branch.jaxpr, inputs[1:]) for branch in eqn.params["branches"]]
    return [any(flags) for flags in zip(*branches, strict=True)]


def _scan_outputs(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    num_consts, num_carry = scan_counts(eqn)
    consts, carry, xs = (
        inputs[:num_consts],
        inputs[num_consts : num_consts + num_carry],
        inputs[num_consts + num_carry :],
    )
    while True:
        outputs = differing_outputs(eqn.params["jaxpr"].jaxpr, [*consts, *carry, *xs])
        widened = [old or new for old, new in zip(carry, outputs[:num_carry], strict=True)]
        if widened == carry:
            return [*carry, *outputs[num_carry:]]
        carry = widened


def _while_outputs(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = inputs[cond_consts + body_consts :]
    while True:
        cond = differing_outputs(eqn.params["cond_jaxpr"].jaxpr, [*inputs[:cond_consts], *carry])
        if cond[0]:
            _check_meeting(eqn)
            return [True] * len(carry)
        body_inputs = [*inputs[cond_consts : cond_consts + body_consts], *carry]
        outputs = differing_outputs(eqn.params["body_jaxpr"].jaxpr, body_inputs)
        widened = [old or new for old, new in zip(carry, outputs, strict=True)]
        if widened == carry:
            return carry
        carry = widened


_CONTROL_FLOW = {"cond": _cond_outputs, "scan": _scan_outputs, "while": _while_outputs}
