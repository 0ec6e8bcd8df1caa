"""Distributed variables: kinds, stores, placement, layouts, shards and aggregation."""

from stratagem.variables.aggregation import (
    aggregate_components,
    mean_of_components,
    spread_over_components,
)
from stratagem.variables.components import (
    WholeValue,
    gather_together,
    store_components,
    stored_components,
)
from stratagem.variables.compressed import is_compressed, is_compressible
from stratagem.variables.initial_values import agree_on_initial_values, initial_digest
from stratagem.variables.kind import (
    VariableKind,
    choose_kind,
    parse_aggregation,
    parse_synchronization,
)
from stratagem.variables.late_reads import LateRead, read_before_replacing
from stratagem.variables.layouts import (
    Division,
    VariableLayouts,
    is_in_parts,
    put_stored,
    require_layouts_used,
    stored_sharding,
)
from stratagem.variables.lost_components import components_of_members
from stratagem.variables.mesh_axes import devices_per_replica_of, groups_of_mesh
from stratagem.variables.placement import (
    Placement,
    Replicated,
    ShardedState,
    UniformPlacement,
    sole_device,
)
from stratagem.variables.registry import Home, StoredVariable, VariableRegistry, home_of
from stratagem.variables.row_changes import changed_rows, sets_rows
from stratagem.variables.row_selection import Rows, as_slice
from stratagem.variables.sharded_store import ShardedStore, is_worth_sharding
from stratagem.variables.sharded_variable import ShardedVariable, shards_of
from stratagem.variables.single_device_store import SingleDeviceStore
from stratagem.variables.store import Store, is_keyed, is_remote, store_of

__all__ = [
    "Division",
    "Home",
    "LateRead",
    "Placement",
    "Replicated",
    "Rows",
    "ShardedState",
    "ShardedStore",
    "ShardedVariable",
    "SingleDeviceStore",
    "Store",
    "StoredVariable",
    "UniformPlacement",
    "VariableKind",
    "VariableLayouts",
    "VariableRegistry",
    "WholeValue",
    "aggregate_components",
    "agree_on_initial_values",
    "as_slice",
    "changed_rows",
    "choose_kind",
    "components_of_members",
    "devices_per_replica_of",
    "gather_together",
    "groups_of_mesh",
    "home_of",
    "initial_digest",
    "is_compressed",
    "is_compressible",
    "is_in_parts",
    "is_keyed",
    "is_remote",
    "is_worth_sharding",
    "mean_of_components",
    "parse_aggregation",
    "parse_synchronization",
    "put_stored",
    "read_before_replacing",
    "require_layouts_used",
    "sets_rows",
    "shards_of",
    "sole_device",
    "spread_over_components",
    "store_components",
    "store_of",
    "stored_components",
    "stored_sharding",
]
