"""Templates and offline validation of Kubernetes, KubeRay and Slurm job descriptions.

Importing it loads neither JAX nor Keras; Jinja, PyYAML and the schemas are loaded on first use.
"""
