"""`tf.function`: compiled functions, and those that read a dataset themselves."""

from __future__ import annotations

import pytest

from tests.unit.cli.migrate.programs import same

PLAIN = [
    "def f(iterator):\n    return strategy.run(g, args=(next(iterator),))\n",
    "def f(it):\n    return it.get_next()\n",
    "def f(dataset):\n    for x in dataset:\n        g(x)\n",
    "def f():\n    return strategy.distribute_datasets_from_function(g)\n",
    "def f(x):\n    return x\nstrategy.run(f, args=(x,))\n",
    "def f(x):\n    return x\ncoordinator.schedule(f, args=(x,))\n",
]


@pytest.mark.parametrize("code", PLAIN)
@pytest.mark.parametrize("decorator", ["@tf.function", "@tf.function(jit_compile=True)"])
def test_decorator_is_dropped(code, decorator) -> None:
    same(f"# A step.\n{decorator}\n{code}", f"# A step.\n{code}")


def test_method_that_replicas_run() -> None:
    same(
        """
        class A:
            @tf.function
            def step(self, x):
                return x
            def train(self, x):
                return self.strategy.run(self.step, args=(x,))
        """,
        """
        class A:
            def step(self, x):
                return x
            def train(self, x):
                return self.strategy.run(self.step, args=(x,))
        """,
    )


def test_other_functions_are_compiled() -> None:
    same(
        """
        @tf.function(input_signature=[a], jit_compile=True)
        def f(x):
            return strategy.run(g, args=(x,))
        @other
        @tf.function
        def h(x):
            return x
        """,
        """
        @sg.function(jit_compile=True)
        def f(x):
            return strategy.run(g, args=(x,))
        @other
        @sg.function
        def h(x):
            return x
        """,
    )


def test_loop_over_a_range() -> None:
    same("for i in tf.range(3):\n    f(i)\n", "for i in range(3):\n    f(i)\n")
