"""GradientTape blocks: the common form, its variants, and those that are left to a person."""

from __future__ import annotations

import textwrap

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


BLOCKS = [
    # The block; names that are used after it; parameters of the function, and what it returns.
    ("x = y\nloss = x", "x", "", "x"),
    ("x += y\nloss = x", "x", "x=x", "x"),
    ("x = x + 1\nloss = x", "", "x=x", ""),
    ("for i in a:\n    b = i\nloss = b", "b, i", "", "(i, b)"),
    ("a.b = c\nloss = c", "a, c", "", ""),
    ("f = lambda u, v=w: u + t\nloss = f(1)", "f, u", "", "f"),
    ("y = [i for i in a if c]\nloss = sum(y)", "y, i", "", "y"),
    ("def f(a, *b, c=d, **e):\n    g = a\n    return g\nloss = f(1)", "f, g", "", "f"),
    ("import a.b, c as d\nloss = a.b.f(d)", "a, d", "", "(a, d)"),
    ("with a as b:\n    pass\nloss = b", "b", "", "b"),
    ("if (n := f()):\n    x = n\nloss = x", "n, x", "", "(n, x)"),
    ("x, (y, *z) = w\nloss = x", "x, y, z", "", "(x, y, z)"),
    ("while x:\n    if y:\n        continue\nloss = 1", "", "", ""),
    ("for x in y:\n    break\nloss = 1", "", "", ""),
]


@pytest.mark.parametrize(("block", "used", "parameters", "returned"), BLOCKS)
def test_names_of_a_block(block, used, parameters, returned) -> None:
    text = body(
        f"def step(q):\n    with tf.GradientTape() as tape:\n{textwrap.indent(block, ' ' * 8)}\n"
        f"    g = tape.gradient(loss, v)\n    use({used})\n"
    )
    value = f"loss, {returned}" if returned else "loss"
    target, more = (f"({value})", ", has_aux=True") if returned else ("loss", "")
    assert text == (
        f"def step(q):\n    def loss_fn({parameters}):\n{textwrap.indent(block, ' ' * 8)}\n"
        f"        return {value}\n"
        f"    {target}, g = sg.value_and_grad(loss_fn, v{more})\n    use({used})\n"
    )


_TAPE = "with tf.GradientTape() as t:\n    l = f(x)\n"
_FUNCTION = "def loss_fn():\n    l = f(x)\n    return l\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            f"{_TAPE}    o.apply_gradients(zip(t.gradient(l, m.w), m.w))\n",
            f"{_FUNCTION}l, gradients = sg.value_and_grad(loss_fn, m.w)\n"
            "o.apply_gradients(zip(gradients, m.w))\n",
        ),
        (
            f"{_TAPE}o.minimize(l, m.w, tape=t)\n",
            f"{_FUNCTION}l, gradients = sg.value_and_grad(loss_fn, m.w)\n"
            "o.apply_gradients(zip(gradients, m.w))\n",
        ),
        (
            f"{_TAPE}a, b = t.gradient(sources=[w, c], target=l)\n",
            f"{_FUNCTION}l, (a, b) = sg.value_and_grad(loss_fn, [w, c])\n",
        ),
        (
            f"with tf.GradientTape() as a, {_TAPE[5:]}g = t.gradient(l, v)\n",
            f"{_FUNCTION}l, g = sg.value_and_grad(loss_fn, v)\n",
        ),
        (
            f"loss_fn = tf.keras.losses.MeanSquaredError()\n{_TAPE}g = t.gradient(l, v)\n",
            f"loss_fn = keras.losses.MeanSquaredError()\n{_FUNCTION.replace('_fn', '_fn_2')}"
            "l, g = sg.value_and_grad(loss_fn_2, v)\n",
        ),
        (
            "with tf.GradientTape(persistent=True) as t:\n    a = f(x)\n    b = h(x)\n"
            "c = t.gradient(a, v)\nd = t.gradient(b, w)\n",
            "def a_fn():\n    a = f(x)\n    return a\na, c = sg.value_and_grad(a_fn, v)\n\n"
            "def b_fn():\n    b = h(x)\n    return b\nb, d = sg.value_and_grad(b_fn, w)\n",
        ),
    ],
    ids=["in the block", "minimize", "targets", "idle tape", "free name", "persistent"],
)
def test_variants_of_a_block(before, after) -> None:
    assert body(before) == after


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


UNUSUAL = {
    "tape is used in the block": "    tape.watch(x)\n    loss = f(x)\ng = tape.gradient(loss, x)\n",
    "0 calls of gradient()": "    loss = f(x)\n",
    "the loss is computed outside": "    p = f(x)\ng = tape.gradient(loss, v)\n",
    "gradient() in a nested statement": "    loss = f(x)\nif a:\n    g = tape.gradient(loss, v)\n",
    "other arguments": "    loss = f(x)\ng = tape.gradient(loss, v, output_gradients=o)\n",
    "tape is used again": "    loss = f(x)\ng = tape.gradient(loss, v)\nprint(tape)\n",
    "break in the block": "    loss = f(x)\n    break\ng = tape.gradient(loss, v)\n",
    "yield in the block": "    loss = yield y\ng = tape.gradient(loss, v)\n",
    "global in the block": "    global x\n    loss = x\ng = tape.gradient(loss, v)\n",
    "delete in the block": "    del x\n    loss = y\ng = tape.gradient(loss, v)\n",
    "return in the block": "    loss = f(x)\n    return loss\ng = tape.gradient(loss, v)\n",
    "the variables are chosen in the block": (
        "    y = f(x)\n    v = y.w\n    loss = y()\ng = tape.gradient(loss, v)\n"
    ),
    "several calls of gradient() in one": (
        "    loss = f(x)\ng = tape.gradient(loss, v), tape.gradient(loss, w)\n"
    ),
}


@pytest.mark.parametrize("reason", UNUSUAL)
def test_unusual_tape_stays_with_a_reason(reason) -> None:
    block = textwrap.indent(UNUSUAL[reason], "    ")
    code = f"while a:\n    with tf.GradientTape() as tape:\n{block}"
    text = body(code)
    marks = [line for line in text.splitlines() if "# STRATAGEM" in line]
    assert len(marks) == 1
    assert reason in marks[0]
    assert text.replace(f"{marks[0]}\n", "") == code


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
