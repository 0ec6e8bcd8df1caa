"""One restore of a checkpoint: what is in it, read when it is asked for, and who has got what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from stratagem.checkpoint.load_status import Consumption
from stratagem.checkpoint.matching import METRICS, OPTIMIZER, match
from stratagem.checkpoint.objects import Part, part_of
from stratagem.checkpoint.saving import load_arrays
from stratagem.checkpoint.sharing import shared_by_first
from stratagem.checkpoint.together import done_by_all, is_first
from stratagem.checkpoint.values import give
from stratagem.checkpoint.waiting import Waiting, waits
from stratagem.group import current_group
from stratagem.messages import explain
from stratagem.storage import Arrays

__all__ = ["COMPONENTS", "Restoration"]

# Beside the aggregates, which are what other numbers of replicas go on with.
COMPONENTS = "components"

_Items = Mapping[str, Arrays]
_Paths = Mapping[str, list[str]]


class Restoration:
    """Gives objects their values of a checkpoint: at once, or when their variables are there.

    Args:
        folder: of the checkpoint.
        manifest: what it says of itself.
        with_components: whether replicas get their own parts again.
        ignored: names of objects that are left alone.
        replace: called with name and value of an object that takes the place of another one.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Mapping[str, Any],
        *,
        with_components: bool,
        ignored: frozenset[str],
        replace: Callable[[str, Any], None],
    ) -> None:
        self._folder, self._manifest, self._replace = folder, manifest, replace
        self._with_components = with_components
        self._saved = {k: v for k, v in manifest["objects"].items() if k not in ignored}
        self._held: dict[str, Arrays] = {}
        self._waiting: dict[str, Waiting] = {}
        self._is_over = False
        values = {
            f"{name}/{entry['path']}": entry["path"].split("/")[0] == METRICS
            for name in self._saved
            for entry in self._entries(name)
        } | {name: False for name in manifest["states"] if name in self._saved}
        optional = (value for value, is_of_metrics in values.items() if is_of_metrics)
        self.consumption = Consumption(str(folder), values, optional)
        self._asked: set[str] = set()

    def wants(self, name: str) -> bool:
        """Returns True if the checkpoint has unused values for an object of this name."""
        return not self._is_over and name in self._saved and name not in self._asked

    def end(self) -> None:
        """Gives nothing any more: another restore has come."""
        self._is_over = True
        self.consumption.expect_partial()

    def hold(self) -> None:
        """Keeps on the host what objects wait for, so that no file has to be there later."""
        paths = {name: self._paths(name) for name, one in self._waiting.items() if not one.is_done}
        own = done_by_all("Checkpoint.restore", lambda: self._load(paths) if is_first() else None)
        self._held |= self._shared(own, paths)

    def restore(self, objects: Mapping[str, Any]) -> None:
        """Gives objects what is there for them. Nothing is changed if anything does not fit.

        Args:
            objects: by name.

        Raises:
            DataLossError: the checkpoint is damaged.
            ValueError: it is of other objects, or shapes differ.
        """
        known = {name: value for name, value in objects.items() if name in self._saved}
        now: list[tuple[Part, dict[str, str]]] = []
        later: list[tuple[Waiting, Any]] = []

        def paths_of(planned: list[tuple[Part, dict[str, str]]]) -> _Paths:
            return {part.name: list(found.values()) for part, found in planned}

        def plan() -> _Items | None:
            self._check_names(objects)
            for name, value in known.items():
                if waits(value, self._entries(name)):
                    waiting = self._waiting_of(name, value)
                    later.append((waiting, waiting.plan()))
                    continue
                part = part_of(name, value)
                self._check_kind(part)
                now.append((part, match(part, self._entries(name), str(self._folder))))
            return self._load(paths_of(now)) if is_first() else None

        own = done_by_all("Checkpoint.restore", plan)
        items = self._shared(own, paths_of(now))
        for part, found in now:
            self._give(part, found, items)
        self._note(objects)
        self._waiting |= {waiting.name: waiting for waiting, _ in later}
        if current_group() is not None and later:
            self.hold()  # not all processes may come to the place where their variables are made
        for waiting, planned in later:
            waiting.carry_out(planned)

    def _waiting_of(self, name: str, value: Any) -> Waiting:
        where = str(self._folder)
        return Waiting(
            name, value, self._entries(name), where, self._give_later, lambda: self._is_over
        )

    def _give_later(self, part: Part, found: Mapping[str, str]) -> None:
        is_held = part.name in self._held
        items = self._held if is_held else self._load({part.name: list(found.values())})
        self._give(part, found, items)
        if self._waiting[part.name].is_done:
            self._held.pop(part.name, None)

    def _give(self, part: Part, found: Mapping[str, str], items: _Items) -> None:
        item = self._saved[part.name]["item"]
        components = {
            path.removeprefix(f"{item}/"): array
            for path, array in items.get(COMPONENTS, {}).items()
            if path.startswith(f"{item}/")
        }
        give(part, found, items[part.name], components)
        if part.source is not None:
            part.source.set_state(self._manifest["states"][part.name])
            self.consumption.consume([part.name])
        if part.tree is not None:
            self._replace(part.name, part.tree.restored())
        self.consumption.consume(f"{part.name}/{path}" for path in found.values())

    def _entries(self, name: str) -> list[dict[str, Any]]:
        saved = self._saved[name]
        leaves = saved.get("leaves", {})
        entries = self._manifest["items"][saved["item"]]
        return [{**entry, **leaves.get(entry["path"], {})} for entry in entries]

    def _paths(self, name: str) -> list[str]:
        return [entry["path"] for entry in self._entries(name)]

    def _of_components(self, paths: _Paths) -> list[str]:
        """Paths of the per-replica components that were saved for these arrays."""
        if not self._with_components:
            return []
        wanted = {f"{self._saved[name]['item']}/{path}" for name in paths for path in paths[name]}
        saved = self._manifest["items"][COMPONENTS]
        return [entry["path"] for entry in saved if entry["path"] in wanted]

    def _load(self, paths: _Paths) -> _Items:
        """Reads arrays by name of the object; on process 0, which has the folder."""
        items = {self._saved[name]["item"]: name for name in paths}
        wanted = {item: paths[name] for item, name in items.items()}
        if components := self._of_components(paths):
            wanted[COMPONENTS] = components
        read = load_arrays(self._folder, self._manifest, wanted)
        return {items.get(item, item): arrays for item, arrays in read.items()}

    def _shared(self, own: _Items | None, paths: _Paths) -> _Items:
        entries = {
            name: [one for one in self._entries(name) if one["path"] in chosen]
            for name, chosen in ((name, set(some)) for name, some in paths.items())
        }
        if components := set(self._of_components(paths)):
            saved = self._manifest["items"][COMPONENTS]
            entries[COMPONENTS] = [one for one in saved if one["path"] in components]
        return shared_by_first(own, entries)

    def _note(self, objects: Mapping[str, Any]) -> None:
        for name, value in objects.items():
            self._asked.add(name)
            if name not in self._saved:
                self.consumption.unmatched[name] = None
                continue
            self.consumption.matched()
            has_optimizer = getattr(value, "optimizer", None) is not None
            groups = {entry["path"].split("/")[0] for entry in self._entries(name)}
            if self._saved[name]["kind"] == "model" and has_optimizer and OPTIMIZER not in groups:
                self.consumption.unmatched[f"{name}.optimizer"] = None

    def _check_names(self, objects: Mapping[str, Any]) -> None:
        unknown = [name for name in objects if name not in self._saved]
        own = [name for name in objects if name != "save_counter"]
        if own and unknown and not any(name in self._saved for name in own):
            raise ValueError(
                explain(
                    f"{self._folder} holds no {' and no '.join(unknown)}.",
                    expected=f"its objects: {', '.join(sorted(self._saved))}.",
                    fix="make the Checkpoint with the names with which it was saved.",
                )
            )

    def _check_kind(self, part: Part) -> None:
        kind = self._saved[part.name]["kind"]
        if (part.source is not None) != (kind == "state"):
            raise ValueError(
                explain(
                    f"{part.name} is a {part.kind} here and was saved in {self._folder} as a "
                    f"{kind}.",
                    expected="an object like the one that was saved.",
                    fix="give the object another name, or restore another checkpoint.",
                )
            )
