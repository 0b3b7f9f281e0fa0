"""Whether this machine can run a job: facts are gathered in one place and judged by pure functions."""
