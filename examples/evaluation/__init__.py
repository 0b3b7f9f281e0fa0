"""Evaluate on held-out prompts while a tiny model learns, on a laptop's CPU."""
