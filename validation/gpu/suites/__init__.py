"""Existing test suites with a GPU as the default device: `python -m validation.gpu.suites`."""
