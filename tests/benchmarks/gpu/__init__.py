"""Tests of `benchmarks.gpu`."""
