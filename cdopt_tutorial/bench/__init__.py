"""Measurements of speed: all variants interleaved in one run, medians, ratios."""
