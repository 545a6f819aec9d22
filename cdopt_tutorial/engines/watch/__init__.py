"""Who of a run's workers is late, and the one error that says so.

A worker writes how far it has come (``pace``); whoever watches over workers asks
``late`` every moment for one that did not join, get further or give a sign of life.
Out comes a WorkerError (``errors``) that names the worker.
"""
