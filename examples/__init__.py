"""Complete examples: each folder makes its own model and data and shows the command that trains them."""
