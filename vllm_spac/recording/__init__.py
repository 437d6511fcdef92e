"""What is recorded while an engine runs: routing, a timeline, counters."""
