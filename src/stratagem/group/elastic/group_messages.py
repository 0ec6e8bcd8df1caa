"""Messages of an elastic group: changes of its members, and errors."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.group.elastic.views import View
from stratagem.messages import explain


class NotAdmittedError(UnavailableError):
    """The others train already, and admit no process."""


def change_text(before: View, after: View, labels: Sequence[str], *, most: int) -> str:
    """Returns a text about a change of the members, without its end."""
    old, new = before.expected.items(), after.expected.items()
    lost = [labels[one] for one, _ in sorted(old - new)]
    joined = [labels[one] for one, _ in sorted(new - old)]
    texts = [f"Lost {', '.join(lost)}"] if lost else []
    texts += [f"{', '.join(joined)} joined"] if joined else []
    text = "; ".join(texts) or "Lost a connection, and no member"
    return f"{text}: {len(after.members)} of {most} continue"


def not_joined(name: str) -> RuntimeError:
    """Returns the error of a process that calls a step before it has joined."""
    return RuntimeError(
        explain(
            f"{name!r} was called in a process that has not joined the others yet.",
            expected="the values of the others, from which it continues.",
            fix="call strategy.admit() before each step of a custom loop; fit joins by itself.",
        )
    )


def not_admitted(label: str, own: int, theirs: int) -> NotAdmittedError:
    """Returns the error of a process that starts while a group with backup workers trains."""
    return NotAdmittedError(
        explain(
            f"{label} has started with num_backup_workers={own}, while the others train with "
            f"num_backup_workers={theirs}.",
            expected="no process that joins later if there are backup workers: the members that "
            "are late would not know of it.",
            fix="nothing, as the others continue. For processes that join, use "
            "num_backup_workers=0 on all.",
            code="SG506",
        )
    )


def agreement_refused(topic: str) -> NotImplementedError:
    """Returns the error for an agreement on a step, which a lost member would leave open."""
    return NotImplementedError(
        explain(
            f"{topic!r} was to be agreed on by the processes of an ElasticStrategy.",
            expected="no PreemptionCheckpointHandler and no BackupAndRestore: members that are "
            "left need no restart.",
            fix="save with keras.callbacks.ModelCheckpoint, or use MultiWorkerMirroredStrategy.",
        )
    )


def waited_too_long(
    label: str, members: Sequence[str], waited_s: float, limit_s: float, setting: str
) -> DeadlineExceededError:
    """Returns the error of a member that waits for others, which run without coming."""
    return DeadlineExceededError(
        explain(
            f"{label} waited {waited_s:.0f} s for values of other members; all of "
            f"{', '.join(members)} still run.",
            expected=f"progress within {limit_s:g} s ({setting}).",
            fix="check what the other processes do; raise the limit if a step takes that long.",
            code="SG508",
        )
    )


def diverged(label: str, name: str, error: Exception) -> RuntimeError:
    """Returns the error of a member whose call of a step differs from that of another."""
    return RuntimeError(
        explain(
            f"{label} called {name}, but {error}.",
            expected="the same calls and programs on all processes.",
            fix="compare the functions and their arguments: find a condition on the process, "
            "another batch size, or an option set on one process only.",
            code="SG402",
        )
    )
