"""What is recorded of a run: its calls, its bytes, its collectives.

A probe records in a worker: ``trace`` who called whom and when, ``wire`` the bytes of
the worker's sockets, ``counted`` a step's collectives and memory. What it found goes
back with the worker's result. ``attach`` puts what a run adds around functions there.
"""
