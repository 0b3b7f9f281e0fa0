"""One half of the system at a time, and dumps of what passes between the halves."""
