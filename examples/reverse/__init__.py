"""Teach a tiny model to reverse five digits, on a laptop's CPU, with no model hub and no download."""
