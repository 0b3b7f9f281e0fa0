"""Settings: a typed tree, its command line, and the checks between flags."""
