"""What constraint dissolving does to a problem, what it costs and what it gains."""
