"""YAML files with a structure of their own: roles, models and server groups, evaluation data sets."""
