# Expected last line: y = 2.000 x + 0.499
"""No Keras model: parameters and optimizer state are pytrees, the optimizer is Optax's.

`strategy.run` takes pytrees and returns them. The parameters come back with a copy a replica and
go into the next step as they are: between devices nothing moves but the gradients, in `all_reduce`.
The data are a distributed dataset; its last batch is short, and counts as what it is.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import stratagem as sg

NUM_EXAMPLES = 1_010
BATCH_SIZE = 64
NUM_EPOCHS = 12
optimizer = optax.adam(
    optax.cosine_decay_schedule(0.1, NUM_EPOCHS * -(-NUM_EXAMPLES // BATCH_SIZE))
)


def main():
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    params = {"slope": jnp.zeros(()), "intercept": jnp.zeros(())}
    state = optimizer.init(params)
    dataset = strategy.distribute_dataset(
        sg.input.Dataset(noisy_line(), batch_size=BATCH_SIZE, shuffle=True)
    )
    for epoch in range(NUM_EPOCHS):
        for x, y in dataset:
            params, state, loss = strategy.run(train_step, args=(params, state, x, y))
        if epoch % 4 == 0:
            print(f"epoch {epoch:2d}  loss {strategy.reduce('MEAN', loss, axis=None):.4f}")
    fitted = strategy.reduce("MEAN", params, axis=None)
    print(f"y = {fitted['slope']:.3f} x + {fitted['intercept']:.3f}")


def train_step(params, state, x, y):
    # Each replica has its share of the loss of the batch, so that loss and gradients are sums.
    shares = jax.value_and_grad(share_of_loss)(params, x, y)
    loss, gradients = sg.get_replica_context().all_reduce("SUM", shares)
    updates, state = optimizer.update(gradients, state)
    return optax.apply_updates(params, updates), state, loss


def share_of_loss(params, x, y):
    return sg.compute_average_loss((params["slope"] * x + params["intercept"] - y) ** 2)


def noisy_line():
    """Returns x and y = 2 x + 0.5 with noise."""
    generator = np.random.default_rng(0)
    x = generator.uniform(-1, 1, NUM_EXAMPLES).astype("float32")
    noise = generator.normal(scale=0.1, size=NUM_EXAMPLES).astype("float32")
    return x, 2 * x + np.float32(0.5) + noise


if __name__ == "__main__":
    main()
