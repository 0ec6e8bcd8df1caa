"""Eager execution of replica functions: op by op, with one thread per replica."""
