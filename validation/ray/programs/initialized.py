"""Workers for which Ray has started JAX's coordination service, as it does for GPUs and TPUs."""

import sys

import ray.train
from ray.train.v2.jax import JaxConfig, JaxTrainer


def train():
    import jax

    was_initialized = jax.distributed.is_initialized()
    import stratagem as sg

    strategy = sg.MultiWorkerMirroredStrategy()
    total = strategy.reduce(
        "SUM",
        strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group + 1),
        axis=None,
    )
    processes = strategy.cluster_resolver.processes()
    ray.train.report({"was": was_initialized, "sum": int(total), "of": processes.num_processes})


trainer = JaxTrainer(
    train,
    jax_config=JaxConfig(use_gpu=True),  # with JAX_PLATFORMS=cpu: initialized, on CPU
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(
        storage_path=sys.argv[1],
        worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},
    ),
)
trainer.fit()
