"""Speed, measured here: what ``cdopt-tutorial bench`` runs.

Each bench is a module with a function ``measure(progress, smoke)``. ``progress`` is
called with a line before each measurement, and ``smoke`` asks for a run of seconds.
It returns the rows, and what else goes into the JSON, such as every single value.
"""
