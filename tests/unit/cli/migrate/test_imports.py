"""Imports: placed, kept, dropped."""

from __future__ import annotations

import pytest

from stratagem.cli.migrate.files import rewrite
from tests.unit.cli.migrate.programs import SG, rewritten

CASES = [
    # TensorFlow stays where a name of it is left, and other packages stay in their place.
    (
        "import os\nimport tensorflow as tf\nimport json\ntf.foo()\ntf.keras.Model\n",
        f"import os\n{SG}import keras\nimport tensorflow as tf\nimport json\n"
        "# STRATAGEM: tf.foo: there is no counterpart yet, see docs/migrate/tool.md\n"
        "tf.foo()\nkeras.Model\n",
    ),
    # Keras is imported first: this package comes before it.
    (
        "import keras\nimport os\nimport tensorflow as tf\ntf.distribute.get_strategy()\n",
        f"{SG}import keras\nimport os\nsg.get_strategy()\n",
    ),
    # An import without use goes, with a comment about it.
    ("# The library.\nimport tensorflow as tf\nx = 1\n", "# The library.\nx = 1\n"),
    (
        "from tensorflow.keras.layers import (\n    Dense,  # a\n    Flatten,\n)\n",
        f"{SG}from keras.layers import (\n    Dense,  # a\n    Flatten,\n)\n",
    ),
    (
        "from tensorflow.keras.layers import Dense, Foo\nFoo()\n",
        f"{SG}from keras.layers import Dense\n"
        "# STRATAGEM: tf.keras.layers.Foo: Keras 3 has no such name, see docs/migrate/tool.md\n"
        "from tensorflow.keras.layers import Foo\n"
        "# STRATAGEM: tf.keras.layers.Foo: Keras 3 has no such name, see docs/migrate/tool.md\n"
        "Foo()\n",
    ),
    (
        "import tensorflow_datasets as tfds\nimport tensorflow as tf\ntf.Variable(1)\n",
        "# STRATAGEM: tensorflow_datasets: load arrays with another library and pass them to "
        f"sg.input.Dataset, see docs/migrate/tool.md\nimport tensorflow_datasets as tfds\n{SG}"
        "sg.Variable(1)\n",
    ),
    ("import os, tensorflow as tf\ntf.Variable(1)\n", f"{SG}import os\nsg.Variable(1)\n"),
    (
        "try:\n    import tensorflow as tf\nexcept ImportError:\n    tf = None\n",
        "try:\n    pass\nexcept ImportError:\n    tf = None\n",
    ),
    (
        "def f():\n    import tensorflow as tf\n    return tf.keras.Model\n",
        f"def f():\n    {SG}    import keras\n    return keras.Model\n",
    ),
    (
        "if a:\n  import tensorflow as tf\n  import tensorflow as tf\n  tf.foo(tf.Variable)\n",
        f"if a:\n  {SG}  import tensorflow as tf\n  import tensorflow as tf\n"
        "  # STRATAGEM: tf.foo: there is no counterpart yet, see docs/migrate/tool.md\n"
        "  tf.foo(sg.Variable)\n",
    ),
    (
        '"""Docs."""\nfrom __future__ import division\nimport tensorflow as tf\ntf.Variable(1)\n',
        f'"""Docs."""\nfrom __future__ import division\n{SG}sg.Variable(1)\n',
    ),
    # NumPy is needed before the program imports it.
    (
        "import tensorflow as tf\nx.numpy()\nimport numpy as np\n",
        f"{SG}import numpy as np\nnp.asarray(x)\nimport numpy as np\n",
    ),
    (f"{SG}import tensorflow as tf\ntf.Variable(1)\n", f"{SG}sg.Variable(1)\n"),
]


@pytest.mark.parametrize(("before", "after"), CASES)
def test_imports(before, after) -> None:
    assert rewritten(before) == after


@pytest.mark.parametrize(
    "text",
    [
        "import keras\nimport numpy as np\nm.numpy()\nm.reset_states()\n",
        "from . import tensorflow\ntensorflow.keras\n",
        "import tensorflow_datasets\n",
        "",
        "# only a comment",
        "x = 'import tensorflow as tf'\n",
    ],
)
def test_program_without_tensorflow_stays(text) -> None:
    assert rewrite(text) == text


def test_star_import_is_left() -> None:
    text = "from tensorflow.keras.layers import *\nDense(1)\n"
    assert rewritten(text) == text
