"""The figures of the book. Each function returns a figure; `show.figure` shows it."""

from cdopt_tutorial.plots.curves import learning_curves
from cdopt_tutorial.plots.landscape import arrows, landscape
from cdopt_tutorial.plots.ownership import ownership
from cdopt_tutorial.plots.timeline import timeline, turned

__all__ = [
    "arrows", "landscape", "learning_curves", "ownership", "timeline", "turned",
]  # fmt: skip
