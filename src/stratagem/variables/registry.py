"""Registry of a strategy's variables; lookup of the strategy that owns a variable.

Keras variables compare elementwise and cannot be dict keys, so entries are keyed by identity and
removed when the variable is garbage collected.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from stratagem.errors import invalid
from stratagem.options import VariableAggregation, VariableSynchronization

if TYPE_CHECKING:
    import keras

# Variable kinds, chosen from annotations, and parsing of these annotations.
#
# =====================  ==============  =========================
# strategy               AUTO, ON_WRITE  ON_READ
# =====================  ==============  =========================
# one replica            PLAIN           PLAIN
# several replicas       MIRRORED        ON_READ, one per replica
# =====================  ==============  =========================

_E = TypeVar("_E", bound=enum.IntEnum)


class VariableKind(enum.Enum):
    """Form in which a variable is stored.

    PLAIN: an array on one device. MIRRORED: a copy on every device. ON_READ: an array of shape
    (num_replicas, ...), with one component per device.
    """

    PLAIN = "plain"
    MIRRORED = "mirrored"
    ON_READ = "on_read"


def _parse(value: object, kind: type[_E], argument: str) -> _E:
    if value is None:
        return kind["NONE"]
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    is_other = isinstance(value, bool) or (
        isinstance(value, enum.Enum) and not isinstance(value, kind)
    )
    if isinstance(value, int) and not is_other and value in list(kind):
        return kind(value)
    names = ", ".join(f'"{name.lower()}"' for name in kind.__members__)
    raise invalid(
        f"{argument}={value!r} is not a valid value.",
        expected=f"a {kind.__name__}, or one of {names}.",
        fix=f"pass one of these for {argument}.",
    )


def parse_synchronization(value: object) -> VariableSynchronization:
    """Parses a member, an int, a string in any case, or None for NONE."""
    return _parse(value, VariableSynchronization, "synchronization")


def parse_aggregation(value: object) -> VariableAggregation:
    """Parses a member, an int, a string in any case, or None for NONE."""
    return _parse(value, VariableAggregation, "aggregation")


def choose_kind(
    synchronization: VariableSynchronization,
    aggregation: VariableAggregation,
    *,
    dtype: str,
    num_replicas: int,
    name: str,
) -> VariableKind:
    """Chooses the kind of a new variable from its annotations.

    Raises ValueError if they are invalid for several replicas. Source: TF 2.21 distribute_lib.py,
    creator_with_resource_vars; values_util.py.
    """
    if num_replicas == 1:
        return VariableKind.PLAIN
    if synchronization is VariableSynchronization.NONE:
        raise invalid(
            f"Variable {name!r} has synchronization NONE under a strategy of {num_replicas} "
            "replicas.",
            expected="AUTO, ON_WRITE or ON_READ: without these, the copies would diverge.",
            fix='omit `synchronization`, or pass "on_read" for one value per replica.',
        )
    is_fractional = dtype.startswith(("float", "bfloat", "complex"))
    if aggregation is VariableAggregation.MEAN and not is_fractional:
        raise invalid(
            f"Variable {name!r} has aggregation MEAN and dtype {dtype}.",
            expected="a floating-point dtype: the mean of integers may not be an integer.",
            fix='choose a float dtype, or aggregation "sum" or "only_first_replica".',
        )
    on_read = synchronization is VariableSynchronization.ON_READ
    return VariableKind.ON_READ if on_read else VariableKind.MIRRORED


@dataclasses.dataclass(frozen=True)
class Home:
    """Strategy, kind and aggregation of a variable."""

    strategy: Any
    kind: VariableKind
    aggregation: VariableAggregation


_homes: dict[int, tuple[weakref.ref[Any], Home]] = {}


def home_of(variable: object) -> Home | None:
    """Returns an object's home; None if it was created outside every scope."""
    entry = _homes.get(id(variable))
    return entry[1] if entry is not None and entry[0]() is variable else None


def is_on_read(variable: object) -> bool:
    """Returns True for a variable with a component on each replica."""
    home = home_of(variable)
    return home is not None and home.kind is VariableKind.ON_READ


class VariableRegistry:
    """Variables of one strategy in creation order.

    A thread holds the `lock` while it traces a step, and from its reads of variables until it has
    replaced their values: a step donates the arrays that it replaces.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._references: dict[int, weakref.ref[Any]] = {}
        self._unsettled: dict[int, weakref.ref[Any]] = {}

    def add(self, variable: keras.Variable, home: Home) -> None:
        """Registers a new variable."""
        reference = self.add_slot(variable, home)
        self._references[id(variable)] = self._unsettled[id(variable)] = reference

    def add_slot(self, variable: object, home: Home) -> weakref.ref[Any]:
        """Registers the home of a value that steps use like a variable, without listing it."""
        key = id(variable)
        registry = weakref.ref(self)  # Weak, because self holds the callback.
        homes = _homes  # at exit, variables outlive the names of this module

        def forget(_: object) -> None:
            homes.pop(key, None)
            remaining = registry()
            if remaining is not None:
                remaining._references.pop(key, None)
                remaining._unsettled.pop(key, None)

        reference = weakref.ref(variable, forget)
        _homes[key] = (reference, home)
        return reference

    def release(self, variable: keras.Variable) -> None:
        """Removes a variable, which then belongs to no strategy."""
        self._references.pop(id(variable), None)
        self._unsettled.pop(id(variable), None)
        _homes.pop(id(variable), None)

    def live(self) -> list[Any]:
        """Returns the existing, initialized variables, oldest first."""
        variables = [reference() for reference in list(self._references.values())]
        return [variable for variable in variables if variable is not None and variable.has_value]

    @property
    def has_unsettled(self) -> bool:
        """True if `take_unsettled` may return variables."""
        return bool(self._unsettled)

    def take_unsettled(self) -> list[Any]:
        """Returns the variables initialized since the last call, oldest first."""
        variables = [reference() for reference in list(self._unsettled.values())]
        settled = [
            variable for variable in variables if variable is not None and variable.has_value
        ]
        for variable in settled:
            self._unsettled.pop(id(variable), None)
        return settled

    def uninitialized(self) -> list[Any]:
        """Returns the variables created in a step that have no value yet."""
        variables = [reference() for reference in list(self._references.values())]
        return [
            variable for variable in variables if variable is not None and not variable.has_value
        ]
