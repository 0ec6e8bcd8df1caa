"""Input service: datasets read by workers apart from trainers, as in tf.data service."""
