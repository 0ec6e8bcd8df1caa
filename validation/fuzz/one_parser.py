"""`python -m validation.fuzz.one_parser NAME CORPUS OPTIONS`: libFuzzer on a parser, by atheris."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["stratagem", "json"]):
    from validation.fuzz.parsers import PARSERS

if __name__ == "__main__":
    atheris.Setup([sys.argv[0], *sys.argv[2:]], PARSERS[sys.argv[1]][0])
    atheris.Fuzz()
