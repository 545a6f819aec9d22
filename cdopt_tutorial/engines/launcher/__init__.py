"""The processes of a run on this host.

``launch`` checks and pickles the roles (``pack``, ``edited``), ``group`` starts a
process for each (``forking``), watches over them and ends them, and ``process`` is what
runs in each. The outcome is their results, or one WorkerError.
"""
