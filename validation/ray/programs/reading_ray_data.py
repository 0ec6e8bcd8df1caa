"""Reads datasets of Ray Data with a strategy, beside Ray's own batches."""

import json

import numpy as np
import ray
import ray.data

import stratagem as sg

ray.init(logging_level="error", log_to_driver=False, ignore_reinit_error=True)
rows = ray.data.range(50, override_num_blocks=4).map_batches(
    lambda batch: {**batch, "square": batch["id"] ** 2}
)
own = sorted(len(batch["id"]) for batch in rows.iter_batches(batch_size=8, batch_format="numpy"))
batches = list(sg.input.Dataset(rows, batch_size=8))
ids = np.concatenate([batch["id"] for batch in batches])
squares = np.concatenate([batch["square"] for batch in batches])

strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
distributed = strategy.distribute_dataset(sg.input.Dataset(rows, batch_size=8, shuffle=True))
totals = [
    int(
        sum(
            strategy.reduce(
                "sum", strategy.run(lambda batch: batch["id"].sum(), args=(batch,)), axis=None
            )
            for batch in distributed
        )
    )
    for _ in range(2)
]
(part,) = rows.streaming_split(1)
of_part = [batch["id"] for batch in sg.input.Dataset(part, batch_size=8)]
print(
    json.dumps(
        {
            "sizes": [own, sorted(len(batch["id"]) for batch in batches)],
            "ids": sorted(ids.tolist()),
            "are_squares": bool((squares == ids**2).all()),
            "totals": totals,
            "part": sorted(np.concatenate(of_part).tolist()),
        }
    )
)
