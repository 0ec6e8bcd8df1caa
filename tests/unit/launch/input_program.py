"""Reads a dataset with input workers in each process of a strategy; prints its totals."""

import numpy as np

import stratagem as sg

strategy = sg.MultiWorkerMirroredStrategy()
rows = np.arange(800, dtype="float32")[:, None]
dataset = strategy.distribute_dataset(
    sg.input.Dataset(rows, batch_size=8, shuffle=True), sg.InputOptions(input_workers=2)
)
for epoch in range(2):
    sums = [
        float(
            strategy.reduce(
                "sum", strategy.run(lambda batch: batch.sum(), args=(batch,)), axis=None
            )
        )
        for batch in dataset
    ]
    print(f"epoch {epoch}: {len(sums)} steps, sum {sum(sums):.0f}", flush=True)
