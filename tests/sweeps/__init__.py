"""Sweeps that maintainers run: a run disturbed at every moment, many times."""
