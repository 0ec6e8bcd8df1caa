"""Two ways to train a model on parameter servers: Keras's `fit`, and a loop by a coordinator."""

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend
import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

CONSOLE = Console(highlight=False)
LOOPS = ("fit", "coordinator")
# Keras's own metric, by so many thresholds.
_NUM_THRESHOLDS = 1000
_LOOK_S = 0.2


def compile_model(model, learning_rate):
    """Gives a model its optimizer, its loss and its metric. Call in the strategy's scope.

    Args:
        model: which returns logits.
        learning_rate: of Adagrad: rows that nobody looks up stand still under it, as they would if
            the whole table was updated.
    """
    model.compile(
        keras.optimizers.Adagrad(learning_rate, initial_accumulator_value=0.01),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(_NUM_THRESHOLDS, from_logits=True, name="auc")],
    )


def train_by_fit(model, law, *, num_steps, batch_size, num_epochs=1):
    """Trains by `fit`: this process reads the batches and deals them out.

    Args:
        model: compiled.
        law: the `ClickLaw`.
        num_steps: how many batches, in all.
        batch_size: examples of each.
        num_epochs: into how many epochs they are cut, after each of which Keras tells of them.
    """
    model.fit(
        law.training(batch_size),
        steps_per_epoch=num_steps // num_epochs,
        epochs=num_epochs,
        shuffle=False,
        verbose=1 if CONSOLE.is_terminal else 2,
    )


def train_by_coordinator(model, law, *, num_steps, batch_size):
    """Trains by scheduled functions: each worker makes batches of its own.

    Args:
        model: compiled, in the scope of a `ParameterServerStrategy`.
        law: the `ClickLaw`.
        num_steps: how many batches, in all.
        batch_size: examples of each.
    """
    strategy, optimizer = model.distribute_strategy, model.optimizer
    coordinator = sg.coordinator.ClusterCoordinator(strategy)
    per_example_loss = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)
    with strategy.scope():
        optimizer.build(model.trainable_variables)
        mean_loss = keras.metrics.Mean()
    num_workers = coordinator.num_workers

    def make_batches():
        own = sg.coordinator.get_current_worker_index()
        return law.training(batch_size, part=own, num_parts=num_workers)

    def replica_step(features, labels):
        def loss_fn():
            logits = model(features, training=True)
            return sg.compute_average_loss(per_example_loss(labels[:, None], logits[:, None]))

        loss, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean_loss.update_state(loss)

    def step(batches):
        strategy.run(replica_step, args=next(batches))

    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    with _bar() as bar:
        task = bar.add_task("training", total=num_steps)
        for scheduled in range(1, num_steps + 1):
            coordinator.schedule(step, args=(batches,))
            bar.update(task, completed=scheduled - coordinator.num_unfinished)
        while not coordinator.wait(_LOOK_S):
            bar.update(task, completed=num_steps - coordinator.num_unfinished)
    CONSOLE.print(f"mean loss of {num_steps} steps: {float(mean_loss.result()):.4f}")


def evaluate(model, law, num_examples, *, batch_size):
    """Returns the AUC on held-out examples, by Keras's metric.

    Args:
        model: compiled.
        law: the `ClickLaw`.
        num_examples: how many.
        batch_size: examples of each batch.
    """
    batches = law.held_out(batch_size, num_examples)
    num_steps = -(-num_examples // batch_size)
    return model.evaluate(batches, steps=num_steps, verbose=0, return_dict=True)["auc"]


def _bar():
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        console=CONSOLE,
        transient=True,
        disable=not CONSOLE.is_terminal,
    )
