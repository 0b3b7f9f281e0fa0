"""The pages, each a function from what is known to components."""
