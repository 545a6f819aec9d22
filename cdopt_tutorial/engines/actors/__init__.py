"""The engines with actors: Ray and Monarch, as two thin files on one driver.

The ``driver``, a process of its own, starts an ``actor`` for each worker, polls it for
messages and ends it. Only ``ray_worker`` and ``monarch_worker`` know how their library
makes an actor and carries a call.
"""
