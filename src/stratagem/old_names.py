"""TensorFlow names that are spelled differently here, for aliases and error messages."""

from __future__ import annotations

# Strategy methods under another name.
SAME_METHODS = {
    "call_for_each_replica": "run",
    "experimental_run_v2": "run",
    "unwrap": "local_results",
}

# Strategy methods, and what to use instead.
OLD_METHODS = {
    "experimental_make_numpy_dataset": "strategy.distribute_dataset(sg.input.Dataset(arrays, "
    "batch_size=global_batch_size))",
    "experimental_run": "strategy.run(fn, args=next(iterator))",
    "experimental_run_steps_on_iterator": "strategy.run_steps(fn, iterator, num_steps)",
    "make_dataset_iterator": "iter(strategy.distribute_dataset(dataset))",
    "make_input_fn_iterator": "iter(strategy.distribute_datasets_from_function(dataset_fn))",
}

# Constructor arguments of strategies, and what to use instead.
OLD_ARGUMENTS = {
    "num_gpus": 'devices=[f"gpu:{i}" for i in range(num_gpus)]',
    "num_gpus_per_worker": 'devices=[f"gpu:{i}" for i in range(num_gpus_per_worker)]',
}

# Names of the `tf` module, and what to use instead.
OLD_NAMES = {
    "GradientTape": "sg.value_and_grad(loss_fn, variables)",
    "constant": "jax.numpy.asarray(value)",
    "data": "sg.input.Dataset(arrays, batch_size=...), or any other dataset",
    "distribute": "the names of tf.distribute themselves, such as sg.MirroredStrategy",
    "print": "jax.debug.print(...)",
    "reduce_mean": "jax.numpy.mean(value)",
    "reduce_sum": "jax.numpy.sum(value)",
}
