"""Matching of an object's variables to the arrays of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stratagem.checkpoint.objects import NAMED_VARIABLES, PYTREE, Part
from stratagem.messages import explain

OPTIMIZER, METRICS = "optimizer_variables", "metrics_variables"
_MAX_NAMES = 5


def match(part: Part, entries: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    """Returns the path of the saved array for each variable path of an object.

    Matches by path or, if automatic layer names differ, in creation order. Dicts of variables
    match by name only and may use a subset of the saved arrays. Raises ValueError if variables,
    shapes, or dtypes of a pytree's leaves differ. `entries` are in saved order.
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
            raise _variables_error(part, list(part.variables), list(shapes), where)
        saved[""] = list(part.variables)  # other saved arrays are ignored
    for group, paths in own.items():
        there = saved.get(group, [])
        if group == OPTIMIZER and not there:
            continue  # the model was saved before it was compiled
        if group == METRICS and len(there) != len(paths):
            continue  # metrics are created with the first batch and reset at each epoch
        if set(there) != set(paths) and len(there) != len(paths):
            raise _variables_error(part, paths, there, where)
        pairs = zip(paths, paths if set(there) == set(paths) else there, strict=True)
        for path, saved_path in pairs:
            shape = tuple(part.variables[path].shape)
            if shape != shapes[saved_path]:
                raise _shape_error(part, path, shape, saved_path, shapes[saved_path], where)
            found[path] = saved_path
    return found


def _match_leaves(part: Part, entries: Sequence[Mapping[str, Any]], where: str) -> dict[str, str]:
    saved = {entry["path"]: entry for entry in entries}
    if saved.keys() != part.variables.keys():
        raise _variables_error(part, list(part.variables), list(saved), where)
    for path, leaf in part.variables.items():
        entry = saved[path]
        there = f"{entry['dtype']}{list(entry['shape'])}"
        if "described" in entry:
            is_same, there = entry["described"] == leaf.described, entry["described"]
        else:  # saved as another kind of object, or a backup in memory
            is_same = there == f"{leaf.dtype}{list(leaf.shape)}"
        if not is_same:
            raise ValueError(
                explain(
                    f"{leaf.path} is {leaf.described} here, {leaf.sharding}, but {there} in "
                    f"{where}, {entry.get('sharding', 'on the host')}.",
                    expected="a pytree with the shapes and dtypes that were saved.",
                    fix="create the arrays with the saved shapes and dtypes, or restore into a "
                    "pytree like the saved one and convert it.",
                    code="SG703",
                )
            )
    return {path: path for path in saved}


def _grouped(part: Part, paths: Iterable[str]) -> dict[str, list[str]]:
    """Groups paths by their first component for models; all paths form one group otherwise."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(path.split("/")[0] if part.kind == "model" else "", []).append(path)
    return groups


def _variables_error(
    part: Part, own: Sequence[str], saved: Sequence[str], where: str
) -> ValueError:
    missing = [path for path in own if path not in set(saved)]
    extra = [path for path in saved if path not in set(own)]
    return ValueError(
        explain(
            f"{where} holds {len(saved)} variables of {part.name}, which has {len(own)}. "
            f"Not in the checkpoint: {_first_names(missing)}. "
            f"Only there: {_first_names(extra)}.",
            expected="an object with the variables that were saved.",
            fix="build the object as it was when saved, or restore another checkpoint.",
            code="SG703",
        )
    )


def _shape_error(
    part: Part,
    path: str,
    shape: tuple[int, ...],
    saved_path: str,
    saved_shape: tuple[int, ...],
    where: str,
) -> ValueError:
    saved_as = "" if path == saved_path else f", saved as {saved_path},"
    return ValueError(
        explain(
            f"{part.name}/{path}{saved_as} has shape {shape} here but {saved_shape} in {where}.",
            expected="the shape that was saved.",
            fix="build the object as it was when saved, or restore another checkpoint.",
            code="SG703",
        )
    )


def _first_names(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _MAX_NAMES} more" if len(paths) > _MAX_NAMES else ""
    return (", ".join(paths[:_MAX_NAMES]) or "none") + more
