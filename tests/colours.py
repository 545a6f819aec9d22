"""How far apart colours are."""

import numpy as np
from matplotlib.colors import to_rgb


def linear(color) -> np.ndarray:
    """The amounts of light of a colour of matplotlib's, without sRGB's curve."""
    c = np.array(to_rgb(color))
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def contrast(one, two) -> float:
    """The contrast ratio of WCAG 2."""
    weights = (0.2126, 0.7152, 0.0722)
    low, high = sorted(float(linear(c) @ weights) for c in (one, two))
    return (high + 0.05) / (low + 0.05)
