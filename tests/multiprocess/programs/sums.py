"""Sums of several dtypes and sizes by one algorithm, compared with NumPy and between processes.

`python sums.py NAME`: NAME is that of a `sg.CommunicationImplementation`.
"""

from __future__ import annotations

import sys

import stratagem as sg  # isort: skip - before jax, because it readies the collectives

import ml_dtypes
import numpy as np

(name,) = sys.argv[1:]
options = sg.CommunicationOptions(implementation=name, bytes_per_pack=2**24)
strategy = sg.MultiWorkerMirroredStrategy(communication_options=options)
count = strategy.num_replicas_in_sync
SIZES = (1, 7, 1001, 300_001)
DTYPES = ("float32", "float16", "int32", ml_dtypes.bfloat16)
chance = np.random.default_rng(5)
whole = [chance.integers(-9, 9, (count, size)).astype(kind) for size in SIZES for kind in DTYPES]
rounded = chance.normal(size=(count, 300_001)).astype("float32")


def distributed(parts):
    return strategy.distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def add(values):
    return sg.get_replica_context().all_reduce("SUM", values)


results = strategy.run(add, args=([distributed(parts) for parts in [*whole, rounded]],))
for parts, result in zip(whole, results, strict=False):
    for local in strategy.local_results(result):
        assert local.dtype == parts.dtype
        np.testing.assert_array_equal(
            np.asarray(local).astype("float64"), parts.astype("float64").sum(axis=0)
        )
locals_of_rounded = [np.asarray(local) for local in strategy.local_results(results[-1])]
np.testing.assert_allclose(
    locals_of_rounded[0], rounded.astype("float64").sum(axis=0), rtol=1e-5, atol=1e-5
)
theirs = sg.collectives.host.all_gather_object([local.tobytes() for local in locals_of_rounded])
assert len({one for of_process in theirs for one in of_process}) == 1
print("equal", count)
