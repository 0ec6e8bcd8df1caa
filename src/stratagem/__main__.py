"""`python -m stratagem`: the same as the `stratagem` command."""

from __future__ import annotations

from stratagem.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main(prog_name="stratagem")
