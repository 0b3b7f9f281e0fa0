"""How a version of the weights gets from the trainer into engines."""
