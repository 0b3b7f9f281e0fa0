"""Parts of the suite at the size of a machine with four or eight GPUs; in small on two, or on the CPU."""
