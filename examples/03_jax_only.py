# Expected last line: y = 2.006 x + 0.499
"""No Keras model: parameters and optimizer state are pytrees, the optimizer is Optax's.

`strategy.run` takes pytrees and returns them. The parameters come back with a copy a replica and
go into the next step as they are: between devices nothing moves but the gradients, in `all_reduce`.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stratagem as sg

NUM_STEPS = 200
EXAMPLES_PER_REPLICA = 32
optimizer = optax.sgd(optax.cosine_decay_schedule(0.1, NUM_STEPS), momentum=0.9)


def main():
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    params = {"slope": jnp.zeros(()), "intercept": jnp.zeros(())}
    state = optimizer.init(params)
    for step in range(NUM_STEPS):
        x, y = strategy.distribute_values_from_function(
            lambda context, step=step: noisy_line(step, context.replica_id_in_sync_group)
        )
        params, state, loss = strategy.run(train_step, args=(params, state, x, y))
        if step % 50 == 0:
            losses = "  ".join(f"{float(part):.4f}" for part in strategy.local_results(loss))
            print(f"step {step:3d}  loss of each replica {losses}")
    fitted = strategy.reduce("MEAN", params, axis=None)
    print(f"y = {fitted['slope']:.3f} x + {fitted['intercept']:.3f}")


def train_step(params, state, x, y):
    loss, gradients = jax.value_and_grad(mean_squared_error)(params, x, y)
    gradients = sg.get_replica_context().all_reduce("MEAN", gradients)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


def mean_squared_error(params, x, y):
    return jnp.mean((params["slope"] * x + params["intercept"] - y) ** 2)


def noisy_line(step, replica_id):
    """Returns x and y = 2 x + 0.5 with noise; each replica draws its own examples."""
    generator = np.random.default_rng([step, replica_id])
    x = generator.uniform(-1, 1, EXAMPLES_PER_REPLICA).astype("float32")
    noise = generator.normal(scale=0.1, size=EXAMPLES_PER_REPLICA).astype("float32")
    return x, 2 * x + 0.5 + noise


if __name__ == "__main__":
    main()
