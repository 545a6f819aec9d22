"""What is recorded of a run: its calls, its bytes, its collectives.

In a worker, ``trace`` records who called whom and when, ``wire`` the bytes of its
sockets, ``counted`` a step's collectives and memory; ``attach`` wraps functions there.
"""
