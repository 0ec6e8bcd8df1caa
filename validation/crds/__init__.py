"""Rendered manifests against the definitions that projects release."""
