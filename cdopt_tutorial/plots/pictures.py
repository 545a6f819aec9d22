"""Small pictures side by side: what a model has learnt of each place in an image."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from cdopt_tutorial.plots.style import SERIES, WIDTH, styled

_COLUMNS = 5
_BLUE, _OCHRE = SERIES[0].color, SERIES[1].color
# Nothing is the page itself, whether it is light or dark.
_STOPS = [(0, (_OCHRE, 1)), (0.5, (_OCHRE, 0)), (0.5, (_BLUE, 0)), (1, (_BLUE, 1))]
_SIGNS = LinearSegmentedColormap.from_list("signs", _STOPS)


@styled
def pictures(images: Mapping[str, ArrayLike], *, label: str) -> Figure:
    """Draw numbers of either sign as pictures, five in a row, all on one scale.

    What is above 0 is blue, what is below is ochre, and 0 is the colour of the page.
    An image is (height, width), under its title; `label` says what the numbers are.
    """
    rows = -(-len(images) // _COLUMNS)
    largest = max(np.abs(image).max() for image in map(np.asarray, images.values()))
    fig = Figure(figsize=(WIDTH, 1.25 * rows + 0.2))
    axes = fig.subplots(rows, _COLUMNS, squeeze=False)
    for ax in axes.flat[len(images) :]:
        ax.set_visible(False)
    for ax, (title, image) in zip(axes.flat, images.items(), strict=False):
        drawn = ax.imshow(image, cmap=_SIGNS, interpolation="none")
        drawn.set_clim(-largest, largest)
        ax.set_title(title, size=9)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set(visible=True, alpha=0.3)
    fig.colorbar(drawn, ax=axes, label=label, shrink=0.8)
    return fig
