"""A run whose processes torchrun started, on this host or on several.

In comes what torchrun says in the environment (``cdopt_tutorial.torchrun``). Each
process launches its own worker; ``peers`` exchanges, through torchrun's ``store``, what
became of the others. A host that falls silent is found there, and is named in the
WorkerError that all the others raise.
"""
