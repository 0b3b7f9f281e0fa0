"""The operator's view of a run folder: a local page and a report, from files alone."""
