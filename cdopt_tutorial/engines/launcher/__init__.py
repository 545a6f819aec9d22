"""The processes of a run on this host.

``launch`` checks the roles and packs them (``pack``, ``edited``), ``group`` starts a
process for each (``forking``), watches over them and ends them, and ``process`` is what
runs in each. Out come their results, or one WorkerError.
"""
