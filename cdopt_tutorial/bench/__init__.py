"""Speed, measured here: what ``cdopt-tutorial bench`` runs, a module for each bench.

Its function ``measure(progress, smoke)`` calls ``progress`` with a line before each
measurement; ``smoke`` asks for a run of seconds. It returns the rows, and what else
goes into the JSON, such as every single value.
"""
