"""Objects on other workers: references to them, calls, and gradients that cross.

A process reaches the others by one network: torch RPC, Ray's actors, or none.
"""

from cdopt_tutorial.calls.references import Reference, alone, apply, reference, remote
