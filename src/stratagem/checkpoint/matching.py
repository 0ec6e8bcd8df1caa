"""Which saved array belongs to which variable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stratagem.checkpoint.objects import NAMED_VARIABLES, PYTREE, Part
from stratagem.messages import explain

__all__ = ["METRICS", "OPTIMIZER", "match"]

OPTIMIZER, METRICS = "optimizer_variables", "metrics_variables"
_MOST_NAMED = 5


def match(part: Part, entries: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    """Finds the saved array of each variable of an object.

    By path; where the paths are others, because layers that are not named by hand have other names
    in another process, by the order in which the object has its variables. In a dict of variables
    names are what its author says, and there may be more in the checkpoint. A pytree has to have
    the same leaves, of the same dtypes.

    Args:
        part: the object.
        entries: path and shape of what was saved of it, in its order then.
        where: the checkpoint, for messages.

    Returns:
        The path in the checkpoint, by the path of the variable.

    Raises:
        ValueError: there are other variables, or one has another shape, or a leaf another dtype.
    """
    if part.kind == PYTREE:
        return _match_leaves(part, entries, where)
    found: dict[str, str] = {}
    saved = _grouped(part, [entry["path"] for entry in entries])
    own = _grouped(part, part.variables)
    shapes = {entry["path"]: tuple(entry["shape"]) for entry in entries}
    if part.kind == NAMED_VARIABLES:
        missing = [path for path in part.variables if path not in shapes]
        if missing:
            raise _other_variables(part, list(part.variables), list(shapes), where)
        saved[""] = list(part.variables)  # what else was saved is not asked for
    for group, paths in own.items():
        there = saved.get(group, [])
        if group == OPTIMIZER and not there:
            continue  # it was not compiled when it was saved
        if group == METRICS and len(there) != len(paths):
            continue  # they come into being with the first batch, and begin anew with each epoch
        if set(there) != set(paths) and len(there) != len(paths):
            raise _other_variables(part, paths, there, where)
        pairs = zip(paths, paths if set(there) == set(paths) else there, strict=True)
        for path, saved_path in pairs:
            shape = tuple(part.variables[path].shape)
            if shape != shapes[saved_path]:
                raise _other_shape(part, path, shape, saved_path, shapes[saved_path], where)
            found[path] = saved_path
    return found


def _match_leaves(part: Part, entries: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    saved = {entry["path"]: entry for entry in entries}
    if saved.keys() != part.variables.keys():
        raise _other_variables(part, list(part.variables), list(saved), where)
    for path, leaf in part.variables.items():
        entry = saved[path]
        there = f"{entry['dtype']}{list(entry['shape'])}"
        if "described" in entry:
            is_same, there = entry["described"] == leaf.described, entry["described"]
        else:  # saved as something else, or kept in memory
            is_same = there == f"{leaf.dtype}{list(leaf.shape)}"
        if not is_same:
            raise ValueError(
                explain(
                    f"{leaf.path} is {leaf.described} here, {leaf.sharding}, and {there} in "
                    f"{where}, {entry.get('sharding', 'on the host')}.",
                    expected="a pytree of the shapes and dtypes with which it was saved.",
                    fix="make the arrays as they were, or restore into a pytree like the saved one "
                    "and convert it.",
                )
            )
    return {path: path for path in saved}


def _grouped(part: Part, paths: Iterable[str]) -> dict[str, list[str]]:
    """Paths by the group that they are of; all of one group where there are no groups."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(path.split("/")[0] if part.kind == "model" else "", []).append(path)
    return groups


def _other_variables(
    part: Part, own: Sequence[str], saved: Sequence[str], where: str
) -> ValueError:
    missing = [path for path in own if path not in set(saved)]
    extra = [path for path in saved if path not in set(own)]
    return ValueError(
        explain(
            f"{where} holds {len(saved)} variables of {part.name}, which has {len(own)}: "
            f"{_named(missing)} only here, {_named(extra)} only there.",
            expected="the object that was saved, or one that is built like it.",
            fix="build it as it was, or restore another checkpoint.",
        )
    )


def _other_shape(
    part: Part, path: str, shape: Any, saved_path: str, saved_shape: Any, where: str
) -> ValueError:
    saved_as = "" if path == saved_path else f", saved as {saved_path},"
    return ValueError(
        explain(
            f"{part.name}/{path}{saved_as} has shape {shape} here and {saved_shape} in {where}.",
            expected="the shape with which it was saved.",
            fix="build the object as it was, or restore another checkpoint.",
        )
    )


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else ""
    return (", ".join(paths[:_MOST_NAMED]) or "none") + more
