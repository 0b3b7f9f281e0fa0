"""How long a run stands still after a crash. `python -m benchmarks.recovery --help`."""
