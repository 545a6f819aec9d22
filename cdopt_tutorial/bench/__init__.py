"""Speed, measured here: what ``cdopt-tutorial bench`` runs, a module for each bench.

``measure(progress, smoke, device)`` calls ``progress`` with a line before each
measurement, and returns the rows, and what else goes into the JSON; ``smoke`` asks for
a run of seconds.
"""
