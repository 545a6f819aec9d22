"""Which of a run's workers is late, and the one error that says so."""
