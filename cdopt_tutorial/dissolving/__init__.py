"""What constraint dissolving does to a problem, and what it costs and gains."""
