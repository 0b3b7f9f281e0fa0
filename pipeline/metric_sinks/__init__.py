"""TensorBoard and Weights & Biases: copies of the run folder's metrics, each written by a process of its own."""
