"""Parts of the suite for GPUs. Each runs in small on a CPU, too."""
