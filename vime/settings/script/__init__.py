"""From a bash launch script to a settings file."""
