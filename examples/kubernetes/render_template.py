"""Renders a template: `stratagem kubernetes render`, as a script with TensorFlow's name for it.

python render_template.py template.yaml.jinja | kubectl create -f -
"""

import sys

from stratagem.cli import main

main(["kubernetes", "render", *sys.argv[1:]], prog_name="stratagem")
