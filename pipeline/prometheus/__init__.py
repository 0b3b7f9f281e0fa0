"""What each process of a run answers to a Prometheus scrape."""
