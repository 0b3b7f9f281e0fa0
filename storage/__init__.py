"""Bytes that must survive: the straw pool and queue, the column codec, locks and logs."""
