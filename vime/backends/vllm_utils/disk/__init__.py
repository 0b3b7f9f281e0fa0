"""Published versions of the weights as folders: whole, or as what has changed since the version before."""
