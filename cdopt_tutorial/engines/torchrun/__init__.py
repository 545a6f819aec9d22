"""A run whose processes torchrun started, on this host or on several.

Each process launches its own worker; ``peers`` exchanges, through torchrun's ``store``,
what became of the others, and finds a host that falls silent.
"""
