"""How the parts of a system call each other, whatever carries the calls.

A system holds references (``reference``), which have the interface of torch's ``RRef``;
its gradients cross by ``gradients``, and several callers wait for each other in a
``rendezvous``. ``network`` says how a call leaves this process: by torch RPC, unless an
actor has put its own there. What a call raises elsewhere is raised here.
"""
