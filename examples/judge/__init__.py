"""The `judge` example: a reward that comes over HTTP."""
