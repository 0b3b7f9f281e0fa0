"""Kernels that do in one pass over memory what takes PyTorch several; see `rule` for where they run."""
