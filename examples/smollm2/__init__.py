"""The `smollm2` example: a real language model, taken from a Python package."""
