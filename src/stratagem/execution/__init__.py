"""Tracing, compilation and execution of replica functions; `sg.function`; row lookups."""
