"""Restore of one checkpoint: reads values on demand and assigns them to objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.checkpoint.broadcast import broadcast_from_first
from stratagem.checkpoint.deferred_restore import DeferredRestore, may_create_variables
from stratagem.checkpoint.group_calls import is_first, run_on_all, run_on_first
from stratagem.checkpoint.load_status import Consumption
from stratagem.checkpoint.matching import METRICS, OPTIMIZER, match
from stratagem.checkpoint.objects import Part, part_of
from stratagem.checkpoint.remote_tables import check_tables, restore_tables
from stratagem.checkpoint.saving import check_arrays, load_arrays
from stratagem.checkpoint.sharded_restore import SavedValue, ShardedRestore
from stratagem.checkpoint.storage.available_memory import fits_in_memory
from stratagem.checkpoint.storage.files import portions
from stratagem.checkpoint.storage.large_arrays import Receiver
from stratagem.checkpoint.values import assign_values, receiver
from stratagem.group.current import current_group
from stratagem.host_memory import release_freed_memory
from stratagem.messages import explain

# Item with per-replica components; the aggregates serve restores with other replica counts.
COMPONENTS = "components"

_Items = Mapping[str, dict[str, np.ndarray[Any, Any]]]
_Paths = Mapping[str, list[str]]


class Restoration:
    """Assigns the values of a checkpoint to objects, at once or when their variables are created.

    Skips objects whose names are `ignored`. `replace` receives the name and value of an object that
    replaces another, such as a pytree.
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
        self._loaded: dict[str, dict[str, np.ndarray[Any, Any]]] = {}
        self._deferred: dict[str, DeferredRestore] = {}
        self._is_over = False
        values = {
            f"{name}/{entry['path']}": entry["path"].split("/")[0] == METRICS
            for name in self._saved
            for entry in self._entries(name)
        } | {name: False for name in manifest["states"] if name in self._saved}
        optional = (value for value, is_of_metrics in values.items() if is_of_metrics)
        self.consumption = Consumption(str(folder), values, optional)
        self._requested: set[str] = set()

    def wants(self, name: str) -> bool:
        """True if the checkpoint has unused values for an object of this name."""
        return not self._is_over and name in self._saved and name not in self._requested

    def end(self) -> None:
        """Cancels pending assignments, because another restore replaces this one."""
        self._is_over = True
        self.consumption.expect_partial()

    def hold(self) -> None:
        """Loads pending values to host memory, so that the files may disappear."""
        paths = {name: self._paths(name) for name, one in self._deferred.items() if not one.is_done}
        self._loaded |= self._load_everywhere(paths)

    def restore(self, objects: Mapping[str, Any]) -> None:
        """Restores objects by name; changes nothing if anything does not match.

        Raises DataLossError for a damaged checkpoint, ValueError for other objects or shapes.
        """
        known = {name: value for name, value in objects.items() if name in self._saved}
        now: list[tuple[Part, dict[str, str]]] = []
        later: list[tuple[DeferredRestore, Any]] = []

        def plan() -> None:
            self._check_names(objects)
            for name, value in known.items():
                if may_create_variables(value, self._entries(name)):
                    deferred = self._deferred_restore_of(name, value)
                    later.append((deferred, deferred.plan()))
                    continue
                part = part_of(name, value)
                self._check_kind(part)
                now.append((part, match(part, self._entries(name), str(self._folder))))

        run_on_all("Checkpoint.restore", plan)
        self._check_tables(now)
        self._assign_all(now)
        for part, found in now:
            self._finish(part, found)
        self._record_consumption(objects)
        self._deferred |= {deferred.name: deferred for deferred, _ in later}
        if current_group() is not None and later:
            self.hold()  # not every process may reach the code that creates the variables
        for deferred, planned in later:
            deferred.apply(planned)

    def _assign_all(self, now: list[tuple[Part, dict[str, str]]]) -> None:
        """Reads values, and sets variables once all values of a portion are verified."""
        sharded = ShardedRestore(self._folder, list(self._saved_values(now)))
        sharded.read()
        whole = [
            (part, {own: one for own, one in found.items() if (part.name, own) not in sharded})
            for part, found in now
        ]
        for paths in self._portions({part.name: list(found.values()) for part, found in whole}):
            items = self._load_everywhere(paths, receiver())
            for part, found in whole:
                chosen = set(paths.get(part.name, ()))
                self._assign(part, {own: one for own, one in found.items() if one in chosen}, items)
            release_freed_memory()
        sharded.assign()
        release_freed_memory()
        for part, found in now:
            self.consumption.consume(f"{part.name}/{path}" for path in found.values())

    def _saved_values(self, now: list[tuple[Part, dict[str, str]]]) -> Iterator[SavedValue]:
        for part, found in now:
            entries = {entry["path"]: entry for entry in self._entries(part.name)}
            item = self._saved[part.name]["item"]
            for own, path in found.items():
                yield SavedValue((part.name, own), part.variables[own], item, entries[path])

    def _deferred_restore_of(self, name: str, value: object) -> DeferredRestore:
        where = str(self._folder)
        return DeferredRestore(
            name, value, self._entries(name), where, self._assign_deferred, lambda: self._is_over
        )

    def _assign_deferred(self, part: Part, found: Mapping[str, str]) -> None:
        is_loaded = part.name in self._loaded
        if is_loaded:
            items = {**self._loaded, part.name: dict(self._loaded[part.name])}
        else:
            items = self._load({part.name: list(found.values())}, receiver())
        self._assign(part, found, items)
        self._finish(part, found)
        if self._deferred[part.name].is_done:
            self._loaded.pop(part.name, None)
            release_freed_memory()

    def _assign(self, part: Part, found: Mapping[str, str], items: _Items) -> None:
        item = self._saved[part.name]["item"]
        components = {
            path.removeprefix(f"{item}/"): array
            for path, array in items.get(COMPONENTS, {}).items()
            if path.startswith(f"{item}/")
        }
        assign_values(part, found, items.get(part.name, {}), components)
        self.consumption.consume(f"{part.name}/{path}" for path in found.values())

    def _check_tables(self, now: list[tuple[Part, dict[str, str]]]) -> None:
        def check() -> None:
            for part, found in now:
                check_tables(self._folder, self._manifest, part, found)

        run_on_first("Checkpoint.restore", check)

    def _finish(self, part: Part, found: Mapping[str, str]) -> None:
        """Restores what an object has besides arrays, once it has these."""
        if part.remote_tables:
            restore_tables(self._folder, self._manifest, part, found)
        if part.source is not None:
            part.source.set_state(self._manifest["states"][part.name])
            self.consumption.consume([part.name])
        if part.tree is not None:
            self._replace(part.name, part.tree.restored())

    def _entries(self, name: str) -> list[dict[str, Any]]:
        saved = self._saved[name]
        leaves = saved.get("leaves", {})
        entries = self._manifest["items"][saved["item"]]
        return [{**entry, **leaves.get(entry["path"], {})} for entry in entries]

    def _paths(self, name: str) -> list[str]:
        return [entry["path"] for entry in self._entries(name)]

    def _component_paths(self, paths: _Paths) -> list[str]:
        """Returns the paths of the per-replica components saved for these arrays."""
        if not self._with_components:
            return []
        wanted = {f"{self._saved[name]['item']}/{path}" for name in paths for path in paths[name]}
        saved = self._manifest["items"][COMPONENTS]
        return [entry["path"] for entry in saved if entry["path"] in wanted]

    def _portions(self, paths: _Paths) -> list[_Paths]:
        """Divides the paths if memory cannot hold all new values beside the old ones.

        Then verifies everything first, because a damaged checkpoint must not change anything.
        """

        def must_divide() -> bool:
            size_bytes = sum(
                math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
                for entries in self._chosen_entries(paths).values()
                for entry in entries
            )
            if fits_in_memory(size_bytes):
                return False
            check_arrays(self._folder, self._manifest, self._wanted(paths))
            return True

        if not run_on_first("Checkpoint.restore", must_divide):
            return [paths]
        entries = self._chosen_entries(paths)
        entries.pop(COMPONENTS, None)  # read with the values of their variables
        return [
            {name: [entry["path"] for entry in some] for name, some in portion.items()}
            for portion in portions(entries)
        ]

    def _load_everywhere(self, paths: _Paths, receive: Receiver | None = None) -> _Items:
        """Returns arrays by name of the object on every process; process 0 reads them."""

        def load() -> _Items | None:
            return self._load(paths, receive) if is_first() else None

        own = run_on_all("Checkpoint.restore", load)
        return broadcast_from_first(own, self._chosen_entries(paths))

    def _load(self, paths: _Paths, receive: Receiver | None) -> _Items:
        """Reads arrays by name of the object; called on process 0, which has the folder."""
        names = {self._saved[name]["item"]: name for name in paths}
        read = load_arrays(self._folder, self._manifest, self._wanted(paths), receive)
        return {names.get(item, item): dict(arrays) for item, arrays in read.items()}

    def _wanted(self, paths: _Paths) -> _Paths:
        """Returns paths by item, with those of the components."""
        wanted: dict[str, list[str]] = {self._saved[name]["item"]: paths[name] for name in paths}
        if components := self._component_paths(paths):
            wanted[COMPONENTS] = components
        return wanted

    def _chosen_entries(self, paths: _Paths) -> dict[str, list[dict[str, Any]]]:
        """Returns the manifest's entries by name of the object, with those of the components."""
        entries = {
            name: [one for one in self._entries(name) if one["path"] in chosen]
            for name, chosen in ((name, set(some)) for name, some in paths.items())
        }
        if components := set(self._component_paths(paths)):
            saved = self._manifest["items"][COMPONENTS]
            entries[COMPONENTS] = [one for one in saved if one["path"] in components]
        return entries

    def _record_consumption(self, objects: Mapping[str, Any]) -> None:
        for name, value in objects.items():
            self._requested.add(name)
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
                    expected=f"one of its objects: {', '.join(sorted(self._saved))}.",
                    fix="create the Checkpoint with the names it was saved with.",
                    code="SG703",
                )
            )

    def _check_kind(self, part: Part) -> None:
        kind = self._saved[part.name]["kind"]
        if (part.source is not None) != (kind == "state"):
            raise ValueError(
                explain(
                    f"{part.name} is a {part.kind} here but was saved in {self._folder} as a "
                    f"{kind}.",
                    expected=f"a {kind} under this name.",
                    fix="give the object another name, or restore another checkpoint.",
                    code="SG703",
                )
            )
