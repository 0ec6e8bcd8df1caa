"""`python -m stratagem`: the same as the `stratagem` command."""

from __future__ import annotations

from stratagem.cli import main

if __name__ == "__main__":
    main(prog_name="stratagem")
