"""Settings of local updates over parameter servers, and the methods that these cannot apply."""

from __future__ import annotations

from stratagem.devices.local_updates import DiLoCo, LocalSGD, LocalUpdates, StreamingDiLoCo
from stratagem.messages import explain
from stratagem.parameter_server.server.local_rounds import LocalRounds


def rounds_of(method: object, num_workers: int, *, synchronous: bool) -> LocalRounds:
    """Returns the settings of a method for so many workers.

    Raises:
        TypeError: not a method of local updates.
        NotImplementedError: a method that servers cannot apply.
    """
    if not isinstance(method, LocalUpdates):
        raise TypeError(
            explain(
                f"local_updates={method!r} is of type {type(method).__name__}.",
                expected="a method of sg.local_updates, or None.",
                fix="pass sg.local_updates.DiLoCo(period=50), for example.",
            )
        )
    if isinstance(method, StreamingDiLoCo) or not isinstance(method, LocalSGD | DiLoCo):
        raise _unsupported(
            f"local_updates={type(method).__name__}(...)",
            expected="LocalSGD or DiLoCo: a fragment would come to the servers at another step "
            "from each worker, and mixing it in would need weights of one age.",
            fix="pass sg.local_updates.DiLoCo(...), or use sg.LocalUpdateStrategy.",
        )
    if not isinstance(method.period, int):
        raise _unsupported(
            f"period={method.period!r}",
            expected="an integer: workers at different steps have different learning rates, so "
            "that their rounds would differ.",
            fix="pass a number of steps, or use sg.LocalUpdateStrategy.",
        )
    if method.compression is not None:
        raise _unsupported(
            f"compression={method.compression!r}",
            expected="compression=None: the error of a compressed change would be lost with its "
            "worker, and servers would have to store one for each.",
            fix="omit compression, and make the period longer to send less.",
        )
    is_outer = isinstance(method, DiLoCo)
    return LocalRounds(
        method.period,
        num_workers,
        1 if synchronous else num_workers,
        method.warmup_steps,
        method.outer_learning_rate if is_outer else 1.0,
        method.outer_momentum if is_outer else None,
    )


def refuse_for_rounds(*, backup_workers: int, max_staleness: int | None) -> None:
    """Raises a NotImplementedError for options that discard pushes."""
    given = [
        *([f"backup_workers={backup_workers}"] if backup_workers else []),
        *([] if max_staleness is None else [f"max_staleness={max_staleness}"]),
    ]
    if given:
        raise _unsupported(
            " and ".join(given),
            expected="neither backup_workers nor max_staleness with local_updates: a push that the "
            "servers discard would take the work of a whole period with it.",
            fix=f"omit {' and '.join(one.partition('=')[0] for one in given)}.",
        )


def _unsupported(received: str, *, expected: str, fix: str) -> NotImplementedError:
    return NotImplementedError(
        explain(
            f"A ParameterServerStrategy with local_updates received {received}.",
            expected=expected,
            fix=fix,
        )
    )
