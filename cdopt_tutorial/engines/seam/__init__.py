"""How the parts of a system call each other, whatever carries the calls.

A system holds references (``reference``), which have the interface of torch's ``RRef``;
gradients cross workers by ``gradients``, and callers wait for each other in a
``rendezvous``. ``network`` carries a call to another process: by torch RPC, unless an
actor has replaced it. What a call raises there is raised here.
"""
