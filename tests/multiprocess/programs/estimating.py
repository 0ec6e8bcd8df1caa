"""Trains, evaluates, predicts and exports with an Estimator on each worker.

Arguments: devices of a worker, the folder of the model, the folder of results.
"""

from __future__ import annotations

import sys

import jax
import numpy as np

import stratagem as sg
from tests.unit.estimator.model_functions import dense_classifier, examples, weights_of

jax.config.update("jax_num_cpu_devices", int(sys.argv[1]))
X, Y = examples(38)
GLOBAL_BATCH = 8


def main(num_devices: int, model_dir: str, folder: str) -> None:
    strategy = sg.MultiWorkerMirroredStrategy()
    config = sg.estimator.RunConfig(
        train_distribute=strategy,
        eval_distribute=strategy,
        save_checkpoints_steps=2,
        save_summary_steps=2,
    )
    estimator = sg.estimator.Estimator(dense_classifier, model_dir, config)
    calls = []

    def input_fn(input_context):
        """Each worker reads its own rows of each global batch."""
        calls.append(input_context.input_pipeline_id)
        count, index = input_context.num_input_pipelines, input_context.input_pipeline_id
        size = GLOBAL_BATCH // input_context.num_replicas_in_sync
        for start in range(0, len(X), GLOBAL_BATCH):
            rows = slice(start, min(start + GLOBAL_BATCH, len(X)))
            x, y = X[rows], Y[rows]
            for place in range(num_devices):
                replica = slice((index * num_devices + place) * size, None)
                if len(x[replica][:size]):
                    yield x[replica][:size], y[replica][:size]
        assert count * num_devices == input_context.num_replicas_in_sync

    estimator.train(input_fn)
    results = estimator.evaluate(input_fn)
    rows = list(estimator.predict(lambda: sg.input.Dataset(X, batch_size=5), "logits"))
    receiver = sg.estimator.export.build_raw_serving_input_receiver_fn(
        jax.ShapeDtypeStruct((1, 5), "float32")
    )
    exported = estimator.export_saved_model(f"{model_dir}/export", receiver)
    process_id = jax.process_index()
    np.savez(
        f"{folder}/process-{process_id}.npz",
        loss=results["loss"],
        accuracy=results["accuracy"],
        global_step=results["global_step"],
        calls=calls,
        logits=[row["logits"] for row in rows],
        exported=exported,
        **weights_of(estimator),
    )


main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
