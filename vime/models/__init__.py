"""Shapes of models: Megatron's flags on one side, Hugging Face's `config.json` on the other."""
