"""`StrategyParts`: what programs, contexts and input know of a strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from stratagem.errors import explain
from stratagem.resources import changing

if TYPE_CHECKING:
    from stratagem.devices.local_updates import Islands, LocalUpdates
    from stratagem.devices.mesh import Topology
    from stratagem.variables.placement import Replicated
    from stratagem.variables.registry import VariableRegistry


class StrategyParts:
    """The parts of a strategy, to which `Strategy` adds the methods of users."""

    topology: Topology
    placement: Replicated
    variables: VariableRegistry
    executor: Any  # a Lockstep
    cross_device_ops: Any  # strategies.CrossDeviceOps
    # The method, if replicas train apart for some steps.
    local_updates: LocalUpdates | None = None
    # The groups of replicas that train apart; None if all train in lockstep.
    islands: Islands | None = None
    # The axis of a step's arguments that is split over the devices of a replica; None for no axis.
    sequence_axis: int | None = None

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that train in sync, with summed gradients."""
        return self.topology.num_replicas


# The stack of contexts of a thread, and the current strategy if the stack is empty.
#
# ====================================  ============  ==================  ====================
# innermost frame                       has_strategy  in_cross_replica    get_replica_context
# ====================================  ============  ==================  ====================
# none                                  False         False               default, 0 of 1
# SCOPE (`with strategy.scope()`)       True          True                None
# REPLICA (function given to `run`)     True          False               of this replica
# MERGE (function given to merge_call)  True          True                None
# UPDATE (given to `extended.update`)   True          True                None
# ====================================  ============  ==================  ====================
#
# Source: TF 2.21 distribution_strategy_context.py.


class FrameKind(enum.Enum):
    """The kind of a context."""

    SCOPE = "scope"
    REPLICA = "replica"
    MERGE = "merge"
    UPDATE = "update"


class ContextFrame(NamedTuple):
    """One context on the stack.

    `replica` is the ReplicaContext of a REPLICA frame, and of MERGE and UPDATE frames opened from
    it; otherwise None.
    """

    kind: FrameKind
    strategy: Any
    replica: Any = None


class _OfThread(threading.local):
    """The stack of this thread, its uses of strategies, and the device of its innermost block."""

    num_uses = 0
    refuses_uses = False
    device: str | None = None

    def __init__(self) -> None:
        self.frames: list[ContextFrame] = []


@dataclasses.dataclass
class _CurrentStrategies:
    """Strategies that are current if the stack is empty."""

    make_default: Callable[[], Any] | None = None
    default: Any = None
    process: Any = None


_thread = _OfThread()
_current_strategies = _CurrentStrategies()


def set_default(make_default: Callable[[], Any]) -> None:
    """Sets the function that creates the default strategy, called at most once."""
    _current_strategies.make_default = make_default


def _default_strategy() -> Any:
    if _current_strategies.default is None:
        assert _current_strategies.make_default is not None, "strategies/default.py fills this slot"
        _current_strategies.default = _current_strategies.make_default()
    return _current_strategies.default


def current_frame() -> ContextFrame | None:
    """Returns the innermost frame of this thread, or None."""
    if _thread.frames:
        return _thread.frames[-1]
    if _current_strategies.process is not None:
        return ContextFrame(FrameKind.SCOPE, _current_strategies.process)
    return None


def depth() -> int:
    """Returns the number of open contexts in this thread."""
    return len(_thread.frames)


def get_strategy() -> Any:
    """Returns the current strategy. Call anywhere.

    Returns:
        The innermost strategy, or the default one; never None.

    Example:
        >>> sg.get_strategy()
        DefaultStrategy()

    Source: TF 2.21 distribution_strategy_context.py, get_strategy.
    """
    frame = current_frame()
    return _default_strategy() if frame is None else frame.strategy


def has_strategy() -> bool:
    """Returns True if a strategy other than the default is current. Call anywhere.

    Returns:
        False outside every scope, and in code that the default strategy runs.

    Example:
        >>> sg.has_strategy()
        False
        >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     sg.has_strategy()
        True

    Source: TF 2.21 distribution_strategy_context.py, has_strategy.
    """
    frame = current_frame()
    return frame is not None and frame.strategy is not _current_strategies.default


def in_cross_replica_context() -> bool:
    """Returns True in code that runs once for all replicas. Call anywhere.

    Returns:
        True in a scope, in `merge_call` and in `extended.update`; False in a replica function and
        outside every scope.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     sg.in_cross_replica_context()
        True
        >>> strategy.run(lambda: print(sg.in_cross_replica_context()))
        False

    Source: TF 2.21 distribution_strategy_context.py, in_cross_replica_context.
    """
    frame = current_frame()
    return frame is not None and frame.kind is not FrameKind.REPLICA


def in_update_context() -> bool:
    """Returns True in code that `extended.update` runs. Call anywhere.

    Returns:
        True if assignments change the variable directly, without aggregation.

    Source: TF 2.21 distribute_lib.py, get_update_replica_id.
    """
    frame = current_frame()
    return frame is not None and frame.kind is FrameKind.UPDATE


class push:  # noqa: N801 - a function's name; a generator takes three times as long, in each step
    """Opens a context within a `with` block."""

    __slots__ = ("_frame",)

    def __init__(self, kind: FrameKind, strategy: StrategyParts, replica: object = None) -> None:
        self._frame = ContextFrame(kind, strategy, replica)

    def __enter__(self) -> None:
        _thread.frames.append(self._frame)

    def __exit__(self, *_: object) -> None:
        _thread.frames.pop()


def push_default() -> push:
    """Opens the scope of the default strategy, inside any other: variables are plain ones."""
    return push(FrameKind.SCOPE, _default_strategy())


def push_scope(strategy: StrategyParts) -> None:
    """Opens `strategy.scope()`; raises RuntimeError if it cannot be opened here."""
    note_use()
    frame = current_frame()
    if frame is not None and frame.kind is FrameKind.REPLICA:
        raise RuntimeError(
            explain(
                f"{strategy}.scope() was opened in replica context.",
                expected="cross-replica context: scopes go around `run`, not inside it.",
                fix="remove the scope; the replica function already runs under the strategy. If "
                "you opened none, a call in the function does: call that outside of `run`.",
                code="SG202",
            )
        )
    require_no_other(strategy, "scope")
    _thread.frames.append(ContextFrame(FrameKind.SCOPE, strategy, frame.replica if frame else None))


def pop_scope(strategy: StrategyParts) -> None:
    """Closes `strategy.scope()`; raises RuntimeError if it is not the innermost context."""
    top = _thread.frames[-1] if _thread.frames else None
    if top is None or top.kind is not FrameKind.SCOPE or top.strategy is not strategy:
        raise RuntimeError(
            explain(
                f"The scope of {strategy} was closed while {top.strategy if top else 'none'} is "
                "the innermost one.",
                expected="scopes closed in the opposite order of opening.",
                fix="use `with strategy.scope():`, which keeps the order.",
                code="SG202",
            )
        )
    _thread.frames.pop()


def require_no_other(strategy: object, method: str) -> None:
    """Raises RuntimeError in the scope of another strategy; `method` is for the message."""
    frame = current_frame()
    if frame is None or frame.strategy is strategy:
        return
    leave = "leave the first scope" if _thread.frames else "call sg.set_strategy(None)"
    raise RuntimeError(
        explain(
            f"{strategy}.{method} was called inside the scope of {frame.strategy}.",
            expected="one strategy at a time.",
            fix=f"{leave} before using the second strategy.",
            code="SG202",
        )
    )


def require_cross_replica(strategy: object, method: str, *, instead: str) -> None:
    """Raises RuntimeError unless a cross-replica method may be called here.

    `instead` is the fix for replica context.
    """
    note_use()
    frame = current_frame()
    if frame is not None and frame.kind is FrameKind.REPLICA:
        raise RuntimeError(
            explain(
                f"strategy.{method} was called in replica context.",
                expected="cross-replica context, outside the function passed to `run`.",
                fix=instead,
                code="SG404",
            )
        )
    require_no_other(strategy, method)


def set_strategy(strategy: object) -> None:
    """Makes a strategy current for the rest of the process, without `with`. For notebooks.

    Args:
        strategy: the strategy, or None for the default.

    Raises:
        RuntimeError: inside a scope or a replica function.
        TypeError: not a strategy.

    Example:
        >>> sg.set_strategy(sg.MirroredStrategy())
        >>> sg.set_strategy(None)

    Source: TF 2.21 distribution_strategy_context.py, experimental_set_strategy.
    """
    if _thread.frames:
        raise RuntimeError(
            explain(
                "set_strategy was called inside a scope or a replica function.",
                expected="no open scope.",
                fix="call it at the top of the program, or use `with strategy.scope():` instead.",
                code="SG202",
            )
        )
    if strategy is not None and not callable(getattr(type(strategy), "scope", None)):
        raise TypeError(
            explain(
                f"set_strategy received {strategy!r} of type {type(strategy).__name__}.",
                expected="a strategy, or None.",
                fix="pass a strategy, for example sg.MirroredStrategy().",
            )
        )
    _current_strategies.process = None if strategy is _current_strategies.default else strategy


experimental_set_strategy = set_strategy


# Uses of strategies: an `sg.function` is compiled as a whole only if it uses none.


class StrategyUsed(BaseException):
    """Ends the trace of an `sg.function` that uses a strategy.

    A BaseException, so that user code does not catch it.
    """


def note_use() -> None:
    """Counts a use of a strategy or its variables; ends the trace of an `sg.function`."""
    _thread.num_uses += 1
    if _thread.refuses_uses:
        raise StrategyUsed


def num_uses() -> int:
    """Returns how often this thread has used a strategy."""
    return _thread.num_uses


def refusing_strategies() -> contextlib.AbstractContextManager[None]:
    """Makes `note_use` raise StrategyUsed within a `with` block."""
    return changing(_thread, refuses_uses=True)


# Device named by the innermost `keras.device` block, for variables created in it.


def explicit_device() -> str | None:
    """Returns the device named by the innermost block, or None."""
    return _thread.device


def naming_device(device: str) -> contextlib.AbstractContextManager[None]:
    """Names a device, such as "cpu:0", within a `with` block."""
    return changing(_thread, device=device)
