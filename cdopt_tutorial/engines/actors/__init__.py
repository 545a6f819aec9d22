"""The actors' engines: Ray and Monarch as two thin files on one driver.

The ``driver``, a process of its own, starts an ``actor`` for each worker, asks them for
signs of life and ends them. Only ``ray_worker`` and ``monarch_worker`` know how their
library makes an actor and carries a call.
"""
