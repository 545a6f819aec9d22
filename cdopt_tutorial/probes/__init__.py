"""What is recorded of a run in its workers: calls, bytes, collectives."""
