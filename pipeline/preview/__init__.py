"""What a run would do, from its settings alone: pure arithmetic that starts nothing."""
