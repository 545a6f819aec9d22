"""Which of a run's workers is late (``late``), and the one error that says so.

A worker writes down its progress (``pace``) for whoever watches over it.
"""
