"""Ray's view of the processes: thin actors that decode bytes, call the plain classes, and encode the answer."""
