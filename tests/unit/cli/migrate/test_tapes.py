"""GradientTape blocks: the common form, its variants, and those that are left to a person."""

from __future__ import annotations

import pytest

from tests.unit.cli.migrate.programs import body, same


def test_usual_block() -> None:
    same(
        """
        def train_step(inputs):
            images, labels = inputs
            # Forward.
            with tf.GradientTape() as tape:
                predictions = model(images, training=True)
                loss = compute_loss(labels, predictions)
            # Backward.
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            accuracy.update_state(labels, predictions)
            return loss
        """,
        """
        def train_step(inputs):
            images, labels = inputs
            # Forward.
            def loss_fn():
                predictions = model(images, training=True)
                loss = compute_loss(labels, predictions)
                return loss, predictions
            # Backward.
            (loss, predictions), gradients = sg.value_and_grad(
                loss_fn, model.trainable_variables, has_aux=True
            )
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            accuracy.update_state(labels, predictions)
            return loss
        """,
    )


def test_several_values_are_used_afterwards() -> None:
    text = body(
        """
        def step(x):
            with tf.GradientTape() as tape:
                a = f(x)
                b = h(a)
                loss = a + b
            g = tape.gradient(loss, v)
            return a, b
        """
    )
    assert "        return loss, (a, b)\n" in text
    assert "    (loss, (a, b)), g = sg.value_and_grad(loss_fn, v, has_aux=True)\n" in text


def test_gradient_within_the_block_and_in_another_call() -> None:
    same(
        """
        def step(x):
            with tf.GradientTape() as t:
                loss = f(x)
                optimizer.apply_gradients(zip(t.gradient(loss, m.weights), m.weights))
        """,
        """
        def step(x):
            def loss_fn():
                loss = f(x)
                return loss
            loss, gradients = sg.value_and_grad(loss_fn, m.weights)
            optimizer.apply_gradients(zip(gradients, m.weights))
        """,
    )


def test_minimize_with_a_tape() -> None:
    same(
        """
        with tf.GradientTape() as tape:
            loss = f(x)
        optimizer.minimize(loss, m.weights, tape=tape)
        """,
        """
        def loss_fn():
            loss = f(x)
            return loss
        loss, gradients = sg.value_and_grad(loss_fn, m.weights)
        optimizer.apply_gradients(zip(gradients, m.weights))
        """,
    )


def test_variable_that_the_block_changes_is_a_parameter() -> None:
    same(
        """
        def step(x):
            loss = 0.0
            with tf.GradientTape() as tape:
                loss += f(x)
            g = tape.gradient(loss, v)
        """,
        """
        def step(x):
            loss = 0.0
            def loss_fn(loss=loss):
                loss += f(x)
                return loss
            loss, g = sg.value_and_grad(loss_fn, v)
        """,
    )


@pytest.mark.parametrize("indent", [8, 4], ids=["in the block", "after it"])
def test_variables_are_chosen_before_the_function(indent) -> None:
    text = body(
        f"""
        def step(x):
            with tf.GradientTape() as tape:
                loss = f(x)
        {" " * indent}v = m.trainable_variables
            g = tape.gradient(loss, v)
        """
    )
    assert text.index("v = m.trainable_variables") < text.index("def loss_fn")


def test_several_targets() -> None:
    text = body(
        """
        with tf.GradientTape() as tape:
            loss = f(x)
        a, b = tape.gradient(loss, [w, bias])
        """
    )
    assert "loss, (a, b) = sg.value_and_grad(loss_fn, [w, bias])\n" in text


def test_loss_function_has_a_free_name() -> None:
    text = body(
        """
        loss_fn = tf.keras.losses.MeanSquaredError()
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x))
        g = tape.gradient(loss, v)
        """
    )
    assert "def loss_fn_2():\n" in text
    assert "sg.value_and_grad(loss_fn_2, v)" in text


ADVERSARIAL = """
    def step(images):
        with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
            fakes = generator(noise)
            count.assign_add(1)
            real = discriminator(images)
            fake = discriminator(fakes)
            gen_loss = f(fake)
            disc_loss = h(real, fake)
        gen = gen_tape.gradient(gen_loss, generator.trainable_variables)
        disc = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
        return gen, disc
"""


def test_two_losses_of_one_block() -> None:
    same(
        ADVERSARIAL,
        """
        def step(images):
            def gen_loss_fn():
                fakes = generator(noise)
                count.assign_add(1)
                fake = discriminator(fakes)
                gen_loss = f(fake)
                return gen_loss, fakes
            (gen_loss, fakes), gen = sg.value_and_grad(
                gen_loss_fn, generator.trainable_variables, has_aux=True
            )

            # STRATAGEM: tf.GradientTape: disc_loss computes fake again: check dropout and updates \
of statistics, see docs/migrate/guides.md
            def disc_loss_fn():
                real = discriminator(images)
                fake = discriminator(fakes)
                disc_loss = h(real, fake)
                return disc_loss
            disc_loss, disc = sg.value_and_grad(disc_loss_fn, discriminator.trainable_variables)
            return gen, disc
        """,
    )


def test_one_persistent_tape_with_two_losses() -> None:
    text = body(
        """
        def step(x):
            with tf.GradientTape(persistent=True) as tape:
                a_loss = f(x)
                b_loss = h(x)
            a = tape.gradient(a_loss, v)
            b = tape.gradient(b_loss, w)
            return a, b
        """
    )
    assert "a_loss, a = sg.value_and_grad(a_loss_fn, v)\n" in text
    assert "b_loss, b = sg.value_and_grad(b_loss_fn, w)\n" in text
    assert "STRATAGEM" not in text


UNUSUAL = {
    "tape is used in the block": "    tape.watch(x)\n    loss = f(x)\ng = tape.gradient(loss, x)\n",
    "0 calls of gradient()": "    loss = f(x)\n",
    "the loss is computed outside": "    p = f(x)\ng = tape.gradient(loss, v)\n",
    "gradient() in a nested statement": "    loss = f(x)\nif a:\n    g = tape.gradient(loss, v)\n",
    "other arguments": "    loss = f(x)\ng = tape.gradient(loss, v, output_gradients=o)\n",
    "tape is used again": "    loss = f(x)\ng = tape.gradient(loss, v)\nprint(tape)\n",
    "break in the block": "    loss = f(x)\n    break\ng = tape.gradient(loss, v)\n",
    "the variables are chosen in the block": (
        "    y = f(x)\n    v = y.w\n    loss = y()\ng = tape.gradient(loss, v)\n"
    ),
    "several calls of gradient() in one": (
        "    loss = f(x)\ng = tape.gradient(loss, v), tape.gradient(loss, w)\n"
    ),
}


@pytest.mark.parametrize("reason", UNUSUAL)
def test_unusual_tape_stays_with_a_reason(reason) -> None:
    code = f"while a:\n    with tf.GradientTape() as tape:\n{_indented(UNUSUAL[reason])}"
    text = body(code)
    marks = [line for line in text.splitlines() if "# STRATAGEM" in line]
    assert len(marks) == 1
    assert reason in marks[0]
    assert text.replace(f"{marks[0]}\n", "") == code


def test_second_tape_without_a_call_is_dropped() -> None:
    text = body(
        "with tf.GradientTape() as a, tf.GradientTape() as b:\n    l = f(x)\ng = b.gradient(l, v)\n"
    )
    assert text.endswith("l, g = sg.value_and_grad(loss_fn, v)\n")


def test_other_contexts_in_the_statement() -> None:
    text = body("with a, tf.GradientTape() as tape:\n    l = f(x)\ng = tape.gradient(l, v)\n")
    assert "other contexts in the statement" in text


def test_unbuilt_model_of_a_tape_is_marked() -> None:
    tape = "with tf.GradientTape() as t:\n    l = f(x)\ng = t.gradient(l, v)\n"
    model = "m = tf.keras.Sequential([tf.keras.layers.Dense(1)])\n"
    built = "m = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(2,))])\n"
    assert "begin the model with keras.Input" in body(model + tape)
    assert "begin the model with keras.Input" not in body(built + tape)
    assert "begin the model with keras.Input" not in body(model)


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())
