"""The output head: what hidden states become, block by block of the vocabulary."""
