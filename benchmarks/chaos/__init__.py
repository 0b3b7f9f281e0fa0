"""A campaign of kills against one run. `python -m benchmarks.chaos --help`."""
