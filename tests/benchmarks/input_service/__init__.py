"""A starved device beside tf.data service and Ray Data: figures, table, and our real service."""
