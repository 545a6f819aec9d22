"""The processes of a run on this host.

In go named roles: ``launch`` checks and packs them (``pack``, ``edited``), ``group``
starts a process for each (``forking``), watches over them and ends them, and
``process`` is what runs in each. Out come their results, or one WorkerError. **A killed
worker is noticed in** ``group.Group._take_messages``, a stopped one in
``_look_for_stopped``, one that is late in ``_look_for_late``.
"""
