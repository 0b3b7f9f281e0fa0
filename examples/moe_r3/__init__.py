"""The `moe_r3` example: a mixture of experts whose trainer replays the experts that the sampler chose."""
