"""Stored rollouts trained again, without engines, queue or Ray, and compared with what the run logged."""
