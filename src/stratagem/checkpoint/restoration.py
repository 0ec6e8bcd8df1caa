"""Restore of one checkpoint: reads values on demand and assigns them to objects."""

from __future__ import annotations

import dataclasses
import glob
import math
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.checkpoint.latest import (
    agree_on_all,
    is_first,
    read_in_time,
    run_on_all,
    run_on_first,
)
from stratagem.checkpoint.objects import Consumption, Part, part_of
from stratagem.checkpoint.restoring import (
    METRICS,
    OPTIMIZER,
    DeferredRestore,
    assign_values,
    is_in_step,
    match,
    may_create_variables,
    receiver,
)
from stratagem.checkpoint.saving import check_tables, restore_tables
from stratagem.checkpoint.storage import files
from stratagem.checkpoint.storage.process import fits_in_memory, wait_for_writing
from stratagem.checkpoint.storage.shard_reader import Receiver, Region, ShardReader
from stratagem.checkpoint.storage.shards import (
    ShardedArray,
    ShardedItems,
    ShardedWrite,
    shard_key,
)
from stratagem.devices.lockstep import compute_on_every_process
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import copied_to_device
from stratagem.environment import release_freed_memory
from stratagem.errors import invalid
from stratagem.group.current import current_group
from stratagem.variables.layouts import store_of
from stratagem.variables.registry import VariableKind, home_of

# Broadcast of arrays read by process 0, so that no other process needs access to the folder.

_Arrays = dict[str, np.ndarray[Any, Any]]

_MIN_PIECE_BYTES = 2**16
_MAX_PIECE_BYTES = 2**25


def broadcast_from_first(
    items: Mapping[str, _Arrays] | None, entries: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, _Arrays]:
    """Returns process 0's arrays by item and path. Call on every process.

    `items` is None on other processes. `entries` holds path, shape and dtype of each array, the
    same on all processes.
    """
    group = current_group()
    if group is None:
        assert items is not None
        return dict(items)
    is_first = group.process_id == 0
    shared: dict[str, _Arrays] = {
        name: {
            entry["path"]: np.asarray(items[name][entry["path"]], order="C")
            if is_first and items is not None
            else np.empty(entry["shape"], np.dtype(entry["dtype"]))
            for entry in entries[name]
        }
        for name in entries
    }
    flats = [_bytes_of(array) for arrays in shared.values() for array in arrays.values()]
    total_bytes = sum(flat.size for flat in flats)
    topology = Topology(tuple(jax.devices()))
    # All pieces have one of a few sizes, since each size compiles a program.
    piece_bytes = min(
        max(2 ** math.ceil(math.log2(max(total_bytes, 1))), _MIN_PIECE_BYTES), _MAX_PIECE_BYTES
    )
    piece = np.zeros(piece_bytes, np.uint8)
    for spans in _pieces([flat.size for flat in flats], piece_bytes):
        if is_first:
            for index, begin, end, at in spans:
                piece[at : at + end - begin] = flats[index][begin:end]
        received = np.asarray(compute_on_every_process(_on_all(topology, piece), _first))
        if not is_first:
            for index, begin, end, at in spans:
                flats[index][begin:end] = received[at : at + end - begin]
    return shared


def _pieces(
    sizes_bytes: Sequence[int], piece_bytes: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yields the spans of arrays that fill each piece: (array, begin, end, offset in the piece)."""
    spans: list[tuple[int, int, int, int]] = []
    at = 0
    for index, size_bytes in enumerate(sizes_bytes):
        begin = 0
        while begin < size_bytes:
            end = min(size_bytes, begin + piece_bytes - at)
            spans.append((index, begin, end, at))
            at += end - begin
            begin = end
            if at == piece_bytes:
                yield spans
                spans, at = [], 0
    if spans:
        yield spans


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8)


def _on_all(topology: Topology, piece: np.ndarray[Any, Any]) -> jax.Array:
    return topology.stack([piece] * topology.num_local_replicas)


def _first(stacked: jax.Array) -> jax.Array:
    return jnp.asarray(stacked)[0]


# Shards of large variables, which each process saves without gathering them.

# Smaller values are gathered: their shards would be many small pieces of a file.
_MIN_BYTES = 2**20
_TEMPORARY = ".orbax-checkpoint-tmp-"


def sharded_value_of(variable: object) -> jax.Array | None:
    """Returns the array of a large variable with a shard on each device; None for others."""
    home, stored = home_of(variable), getattr(variable, "stored", None)
    is_divided = store_of(variable) is not None or getattr(variable, "division", None) is not None
    if home is None or home.kind is VariableKind.ON_READ or not is_divided:
        return None
    if getattr(variable, "local_copy", None) is not None:  # processes have values of their own
        return None
    if not isinstance(stored, jax.Array) or stored.is_fully_replicated:
        return None
    return stored if stored.nbytes >= _MIN_BYTES else None


def own_shards(path: str, array: jax.Array) -> Iterator[tuple[str, jax.Array]]:
    """Yields the shards that this process saves, of copies one, with the keys of a checkpoint."""
    shape = array.sharding.shard_shape(array.shape)
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            begins = (one.start or 0 for one in shard.index)
            position = (at // size for at, size in zip(begins, shape, strict=True))
            yield shard_key(path, tuple(position)), shard.data


def sharded_items_of(parts: Mapping[str, Part], items: Mapping[str, str]) -> ShardedItems:
    """Returns the items with variables that are saved as shards."""
    arrays = {items[name]: _sharded_arrays(part) for name, part in parts.items()}
    return {item: of for item, of in arrays.items() if any(of.values())}


def begin_sharded_write(
    folder: Path, parts: Mapping[str, Part], items: Mapping[str, str]
) -> ShardedWrite | None:
    """Returns where processes write their shards; None if all values are gathered.

    Several processes write shards if all of them see a temporary folder that process 0 creates
    beside the checkpoint. Call on every process.
    """
    arrays = sharded_items_of(parts, items)
    if not arrays:
        return None
    group = current_group()
    created = run_on_first("Checkpoint.write", lambda: _create_beside(folder))
    if created is None:
        return None
    temporary = Path(created)
    if not agree_on_all("Checkpoint.write", temporary.is_dir):
        if is_first():
            shutil.rmtree(temporary, ignore_errors=True)
        return None
    return ShardedWrite(temporary, 1 if group is None else group.num_processes, arrays)


def bytes_to_write(part: Part) -> int:
    """Returns the size of what this process writes of an object, without components."""
    size_bytes = 0
    for path, variable in part.variables.items():
        array = sharded_value_of(variable)
        if array is not None:
            size_bytes += sum(shard.nbytes for _, shard in own_shards(path, array))
        elif is_first():
            size_bytes += math.prod(variable.shape) * np.dtype(variable.dtype).itemsize
    return size_bytes


def _sharded_arrays(part: Part) -> dict[str, ShardedArray | None]:
    return {path: _described(sharded_value_of(one)) for path, one in part.variables.items()}


def _described(array: jax.Array | None) -> ShardedArray | None:
    if array is None:
        return None
    shard_shape = array.sharding.shard_shape(array.shape)
    return ShardedArray(array.shape, str(np.dtype(array.dtype)), shard_shape)


def _create_beside(folder: Path) -> str | None:
    """Creates a temporary folder, and removes those that a killed save of this name left."""
    stale = list(folder.parent.glob(f"{glob.escape(folder.name)}{_TEMPORARY}*"))
    if stale:
        wait_for_writing()
    for one in stale:
        shutil.rmtree(one, ignore_errors=True)
    temporary = folder.with_name(f"{folder.name}{_TEMPORARY}{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
    except OSError:  # the write itself finds the reason
        return None
    return str(temporary)


# Restore of large sharded variables: each process reads what its devices need.

_METADATA = "_CHECKPOINT_METADATA"
_Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class SavedValue:
    """A variable, by object and path, and the saved array that becomes its value."""

    name: tuple[str, str]
    variable: Any
    item: str
    entry: Mapping[str, Any]


class ShardedRestore:
    """Values of the variables that are read as shards, of those that a restore sets.

    Values stay on the host until `assign`, so that a damaged checkpoint changes nothing. Without
    memory for that, they are verified first and read one by one. Call on every process.
    """

    def __init__(self, folder: Path, values: Sequence[SavedValue]) -> None:
        self._folder, self._reader = folder, ShardReader(folder)
        self._values = {one.name: one for one in self._chosen(folder, values)}
        self._read: dict[tuple[str, str], list[_Array]] = {}

    def __contains__(self, name: tuple[str, str]) -> bool:
        return name in self._values

    def read(self) -> None:
        """Reads or verifies all shards; raises DataLossError for damage, on all processes."""
        if not self._values:
            return
        size_bytes = sum(_local_bytes(one) for one in self._values.values())
        fits = agree_on_all("Checkpoint.restore", lambda: fits_in_memory(size_bytes))

        regions = {one.name: list(_regions(one.variable).values()) for one in self._values.values()}

        def work() -> None:
            for one in self._values.values():
                if fits:
                    self._read[one.name] = self._reader.read(one.item, one.entry, regions[one.name])
                else:
                    self._reader.verify(one.item, one.entry, regions[one.name])

        run_on_all("Checkpoint.restore", lambda: read_in_time(self._folder, work))

    def assign(self) -> None:
        """Sets the variables."""
        for one in self._values.values():
            if one.name in self._read:
                _set_shards(one.variable, self._read.pop(one.name))
            else:
                run_on_all("Checkpoint.restore", self._assignment(one))

    def _assignment(self, one: SavedValue) -> Callable[[], None]:
        regions = list(_regions(one.variable).values())

        def work() -> None:
            read = partial(self._reader.read, one.item, one.entry, regions)
            _set_shards(one.variable, read_in_time(self._folder, read))

        return work

    def _chosen(self, folder: Path, values: Sequence[SavedValue]) -> list[SavedValue]:
        sharded = [one for one in values if sharded_value_of(one.variable) is not None]
        if not sharded or is_in_step() or not _is_same_everywhere(folder):
            return []
        return sharded


def _is_same_everywhere(folder: Path) -> bool:
    """True if all processes find the checkpoint of process 0."""

    def digest() -> int | None:
        try:
            return zlib.crc32((folder / _METADATA).read_bytes())
        except OSError:
            return None

    expected = run_on_first("Checkpoint.restore", lambda: read_in_time(folder, digest))
    return agree_on_all(
        "Checkpoint.restore",
        lambda: expected is not None and read_in_time(folder, digest) == expected,
    )


def _regions(variable: Any) -> dict[str, Region]:
    """Returns the parts of a value that devices of this process hold, each once."""
    return {str(region): region for region in _regions_by_device(variable).values()}


def _regions_by_device(variable: Any) -> dict[jax.Device, Region]:
    array = variable.stored
    indices = array.sharding.addressable_devices_indices_map(array.shape)
    return {
        device: tuple(
            slice(*one.indices(size)[:2]) for one, size in zip(index, array.shape, strict=True)
        )
        for device, index in indices.items()
    }


def _local_bytes(one: SavedValue) -> int:
    array = one.variable.stored
    shard_size = int(np.prod(array.sharding.shard_shape(array.shape)))
    return len(_regions(one.variable)) * shard_size * np.dtype(one.entry["dtype"]).itemsize


def _set_shards(variable: Any, shards: list[_Array]) -> None:
    """Sets a variable from the values of its `_regions`."""
    old = variable.stored
    by_region = dict(zip(_regions(variable), shards, strict=True))
    placed = [
        copied_to_device(by_region[str(region)].astype(old.dtype, copy=False), device, old.sharding)
        for device, region in _regions_by_device(variable).items()
    ]
    variable.stored = jax.make_array_from_single_device_arrays(
        old.shape, old.sharding, jax.block_until_ready(placed)
    )


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
            check = partial(files.check_arrays, self._folder, self._manifest, self._wanted(paths))
            read_in_time(self._folder, check)
            return True

        if not run_on_first("Checkpoint.restore", must_divide):
            return [paths]
        entries = self._chosen_entries(paths)
        entries.pop(COMPONENTS, None)  # read with the values of their variables
        return [
            {name: [entry["path"] for entry in some] for name, some in portion.items()}
            for portion in files.portions(entries)
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
        own = receive if current_group() is None else None  # others get bytes
        wanted = self._wanted(paths)
        read = read_in_time(
            self._folder, lambda: files.read_arrays(self._folder, self._manifest, wanted, own)
        )
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
            self.consumption.has_matched = True
            has_optimizer = getattr(value, "optimizer", None) is not None
            groups = {entry["path"].split("/")[0] for entry in self._entries(name)}
            if self._saved[name]["kind"] == "model" and has_optimizer and OPTIMIZER not in groups:
                self.consumption.unmatched[f"{name}.optimizer"] = None

    def _check_names(self, objects: Mapping[str, Any]) -> None:
        unknown = [name for name in objects if name not in self._saved]
        own = [name for name in objects if name != "save_counter"]
        if own and unknown and not any(name in self._saved for name in own):
            raise invalid(
                f"{self._folder} holds no {' and no '.join(unknown)}.",
                expected=f"one of its objects: {', '.join(sorted(self._saved))}.",
                fix="create the Checkpoint with the names it was saved with.",
                code="SG703",
            )

    def _check_kind(self, part: Part) -> None:
        kind = self._saved[part.name]["kind"]
        if (part.source is not None) != (kind == "state"):
            raise invalid(
                f"{part.name} is a {part.kind} here but was saved in {self._folder} as a {kind}.",
                expected=f"a {kind} under this name.",
                fix="give the object another name, or restore another checkpoint.",
                code="SG703",
            )
