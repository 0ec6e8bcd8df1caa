# Expected last line: 16 images, restored generator makes the same: True
"""Ports "Deep Convolutional Generative Adversarial Network" to two replicas,
https://www.tensorflow.org/tutorials/generative/dcgan

    python examples/guides/10_dcgan.py

Differences from TensorFlow's guide:

- It runs under a strategy: models and optimizers are made in its scope, losses are averaged over
  the global batch, and `strategy.run` calls the step.
- scikit-learn's digits of 8 x 8 pixels replace MNIST, so that both models have fewer filters.
- `sg.value_and_grad` replaces the two tapes. The images of the generator's pass are those that the
  discriminator learns from; its dropout is drawn once for each of the two losses.
- Noise comes from a `SeedGenerator`, which JAX needs within a step.
- The images are drawn into files with Matplotlib; there is no animation.
"""

import os
import tempfile
import time

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import jax
import keras
import numpy as np
from keras import layers
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

# Where there is no accelerator the CPU counts as two devices; ignored where there is one.
jax.config.update("jax_num_cpu_devices", 2)

print(sg.__version__)
keras.utils.set_random_seed(0)
strategy = sg.MirroredStrategy()
print(f"Number of devices: {strategy.num_replicas_in_sync}")

# Load and prepare the dataset
train_images = load_digits().images
train_images = train_images.reshape(train_images.shape[0], 8, 8, 1).astype("float32")
train_images = (train_images - 8) / 8  # Normalize the images to [-1, 1]

BATCH_SIZE = 64

# Batch and shuffle the data
train_dataset = sg.input.Dataset(train_images, batch_size=BATCH_SIZE, shuffle=True)
train_dist_dataset = strategy.experimental_distribute_dataset(train_dataset)


# The Generator
def make_generator_model():
    model = keras.Sequential()
    model.add(layers.Input((100,)))
    model.add(layers.Dense(2 * 2 * 64, use_bias=False))
    model.add(layers.BatchNormalization())
    model.add(layers.LeakyReLU())

    model.add(layers.Reshape((2, 2, 64)))
    assert model.output_shape == (None, 2, 2, 64)  # None is the batch size

    model.add(layers.Conv2DTranspose(32, 3, strides=1, padding="same", use_bias=False))
    assert model.output_shape == (None, 2, 2, 32)
    model.add(layers.BatchNormalization())
    model.add(layers.LeakyReLU())

    model.add(layers.Conv2DTranspose(16, 3, strides=2, padding="same", use_bias=False))
    assert model.output_shape == (None, 4, 4, 16)
    model.add(layers.BatchNormalization())
    model.add(layers.LeakyReLU())

    model.add(
        layers.Conv2DTranspose(1, 3, strides=2, padding="same", use_bias=False, activation="tanh")
    )
    assert model.output_shape == (None, 8, 8, 1)
    return model


with strategy.scope():
    generator = make_generator_model()

noise = keras.random.normal([1, 100])
generated_image = generator(noise, training=False)


# The Discriminator
def make_discriminator_model():
    model = keras.Sequential()
    model.add(layers.Input((8, 8, 1)))
    model.add(layers.Conv2D(16, 3, strides=2, padding="same"))
    model.add(layers.LeakyReLU())
    model.add(layers.Dropout(0.3))

    model.add(layers.Conv2D(32, 3, strides=2, padding="same"))
    model.add(layers.LeakyReLU())
    model.add(layers.Dropout(0.3))

    model.add(layers.Flatten())
    model.add(layers.Dense(1))
    return model


with strategy.scope():
    discriminator = make_discriminator_model()
decision = discriminator(generated_image)
print(decision)

# Define the loss and optimizers
cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


def discriminator_loss(real_output, fake_output):
    real_loss = cross_entropy(keras.ops.ones_like(real_output), real_output)
    fake_loss = cross_entropy(keras.ops.zeros_like(fake_output), fake_output)
    return sg.nn.compute_average_loss(real_loss) + sg.nn.compute_average_loss(fake_loss)


def generator_loss(fake_output):
    return sg.nn.compute_average_loss(cross_entropy(keras.ops.ones_like(fake_output), fake_output))


with strategy.scope():
    generator_optimizer = keras.optimizers.Adam(1e-3)
    discriminator_optimizer = keras.optimizers.Adam(1e-3)

# Save checkpoints
checkpoint_dir = tempfile.mkdtemp()
checkpoint_prefix = os.path.join(checkpoint_dir, "ckpt")
checkpoint = sg.train.Checkpoint(
    generator_optimizer=generator_optimizer,
    discriminator_optimizer=discriminator_optimizer,
    generator=generator,
    discriminator=discriminator,
)

# Define the training loop
EPOCHS = 12
noise_dim = 100
num_examples_to_generate = 16
seed = keras.random.normal([num_examples_to_generate, noise_dim])
with strategy.scope():
    noise_seed = keras.random.SeedGenerator(1)


def replica_step(images):
    noise = keras.random.normal([len(images), noise_dim], seed=noise_seed)

    def gen_loss_fn():
        generated_images = generator(noise, training=True)
        fake_output = discriminator(generated_images, training=True)
        return generator_loss(fake_output), generated_images

    (gen_loss, generated_images), gradients_of_generator = sg.value_and_grad(
        gen_loss_fn, generator.trainable_variables, has_aux=True
    )

    def disc_loss_fn():
        real_output = discriminator(images, training=True)
        fake_output = discriminator(generated_images, training=True)
        return discriminator_loss(real_output, fake_output)

    disc_loss, gradients_of_discriminator = sg.value_and_grad(
        disc_loss_fn, discriminator.trainable_variables
    )
    generator_optimizer.apply_gradients(
        zip(gradients_of_generator, generator.trainable_variables, strict=True)
    )
    discriminator_optimizer.apply_gradients(
        zip(gradients_of_discriminator, discriminator.trainable_variables, strict=True)
    )
    return gen_loss, disc_loss


@sg.function
def train_step(images):
    return strategy.reduce("SUM", strategy.run(replica_step, args=(images,)), axis=None)


def train(dataset, epochs):
    for epoch in range(epochs):
        start = time.time()
        for image_batch in dataset:
            gen_loss, disc_loss = train_step(image_batch)

        # Produce images as you go
        generate_and_save_images(generator, epoch + 1, seed)

        # Save the model every 4 epochs
        if (epoch + 1) % 4 == 0:
            checkpoint.save(file_prefix=checkpoint_prefix)

        print(
            f"Time for epoch {epoch + 1} is {time.time() - start:.1f} sec, "
            f"losses {gen_loss:.4f} {disc_loss:.4f}"
        )
    generate_and_save_images(generator, epochs, seed)


# Generate and save images
def generate_and_save_images(model, epoch, test_input):
    # In inference mode: batch normalization uses its moving statistics.
    predictions = np.asarray(model(test_input, training=False))
    fig = Figure(figsize=(4, 4))
    for i, axes in enumerate(fig.subplots(4, 4).flat):
        axes.imshow(predictions[i, :, :, 0] * 8 + 8, cmap="gray")
        axes.axis("off")
    fig.savefig(os.path.join(checkpoint_dir, f"image_at_epoch_{epoch:04d}.png"))
    return predictions


# Train the model
train(train_dist_dataset, EPOCHS)

# Restore the latest checkpoint
made = generate_and_save_images(generator, EPOCHS, seed)
generator.set_weights([np.zeros_like(weight) for weight in generator.get_weights()])
checkpoint.restore(sg.train.latest_checkpoint(checkpoint_dir))
made_again = generate_and_save_images(generator, EPOCHS, seed)
print(f"{len(made)} images, restored generator makes the same: {np.array_equal(made, made_again)}")
