# Expected last line: Mean of what is real: 4, of what is made: 4
"""A generative adversarial network on two replicas: two models, two optimizers, one step.

The generator learns to make numbers that look as if drawn from a normal distribution with mean 4
and deviation 0.5. Two hundred steps are one call: `run_steps` loops on the devices.
"""

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np
from keras import layers, ops

NUM_EXAMPLES = 128_000
GLOBAL_BATCH_SIZE = 128
NOISE_SIZE = 4


def main():
    real = np.random.default_rng(0).normal(4.0, 0.5, (NUM_EXAMPLES, 1)).astype("float32")
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        generator = network(NOISE_SIZE)
        discriminator = network(1)
        generator_optimizer = keras.optimizers.Adam(3e-4, beta_1=0.5)
        discriminator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
        noise = keras.random.SeedGenerator(1)
    loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)

    def judged(examples, label):
        logits = discriminator(examples, training=True)
        return sg.compute_average_loss(loss(label * ops.ones_like(logits), logits))

    def step(examples):
        replica = sg.get_replica_context().replica_id_in_sync_group
        key = jax.random.fold_in(jax.random.key(noise.next()[1]), replica)
        inputs = jax.random.normal(key, (examples.shape[0], NOISE_SIZE))

        def discriminator_loss():
            return judged(examples, 1.0) + judged(generator(inputs), 0.0)

        def generator_loss():
            return judged(generator(inputs, training=True), 1.0)

        results = []
        for loss_fn, model, optimizer in (
            (discriminator_loss, discriminator, discriminator_optimizer),
            (generator_loss, generator, generator_optimizer),
        ):
            value, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            results.append(value)
        return results

    dataset = sg.input.Dataset(real, batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
    for epoch in range(1, 4):
        iterator = iter(strategy.distribute_dataset(dataset))
        for _ in range(NUM_EXAMPLES // GLOBAL_BATCH_SIZE // 200):
            of_discriminator, of_generator = strategy.run_steps(step, iterator, 200, reduce="sum")
        made = generator.predict(
            np.random.default_rng(epoch).normal(size=(2000, NOISE_SIZE)).astype("float32"),
            verbose=0,
        )
        print(
            f"epoch {epoch}  loss of the discriminator {of_discriminator.mean():.3f}, "
            f"of the generator {of_generator.mean():.3f}  "
            f"made: mean {made.mean():.2f}, deviation {made.std():.2f}"
        )
    print(f"Mean of what is real: {real.mean():.0f}, of what is made: {made.mean():.0f}")


def network(input_size):
    return keras.Sequential(
        [
            layers.Input((input_size,)),
            layers.Dense(32, activation="gelu"),
            layers.Dense(32, activation="gelu"),
            layers.Dense(1),
        ]
    )


if __name__ == "__main__":
    main()
