"""Engines with actors: a driver for all, and a file for each library."""
