"""What is recorded of a run: its calls, its bytes, its collectives.

A probe is attached in a worker (``attach``) and records there: ``trace`` who called
whom and when, ``wire`` the bytes of the worker's sockets, ``counted`` a step's
collectives and memory. What it found goes back with the worker's result. Where nobody
attached one it costs nothing.
"""
