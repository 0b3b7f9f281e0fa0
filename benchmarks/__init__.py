"""Measurements, one module each: `python -m benchmarks.NAME [--json] [--quick]`."""
