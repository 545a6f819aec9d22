"""Who of a run's workers is late (``late``), and the one error that says so.

A worker writes how far it has come (``pace``) for whoever watches over it.
"""
