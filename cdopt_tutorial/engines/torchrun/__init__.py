"""A run whose processes torchrun started, on this host or on several.

Each process launches its own worker. ``peers`` exchanges, through torchrun's ``store``,
what becomes of them, and notices a host that falls silent.
"""
