"""How samples travel from producers to trainer ranks when it is not through a pool on disk."""
