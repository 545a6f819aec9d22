"""Small pictures side by side: what a model has learnt of each place in an image."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from cdopt_tutorial.plots.style import SERIES, new_figure, styled

_CELL = 1.25  # inches of a picture with its title
_BLUE, _OCHRE = SERIES[0].color, SERIES[1].color

# Nothing is the page itself, whether it is light or dark.
_SIGNS = LinearSegmentedColormap.from_list(
    "signs",
    [
        (0.0, (_OCHRE, 1.0)),
        (0.5, (_OCHRE, 0.0)),
        (0.5, (_BLUE, 0.0)),
        (1.0, (_BLUE, 1.0)),
    ],
)


@styled
def pictures(
    images: Mapping[str, ArrayLike], *, label: str, columns: int = 5, size: str = "wide"
) -> Figure:
    """Draw numbers of either sign as pictures, all on one scale.

    Called by the chapters. What is above 0 is blue, what is below is ochre, and 0 is
    the colour of the page.

    Args:
        images: by title, each (height, width).
        label: what the numbers are, with their unit.
        columns: pictures in a row.
        size: `wide` or `small`; the height follows from the rows.

    Raises:
        ValueError: there are no pictures, or one is not of two dimensions.
    """
    if not images:
        raise ValueError("no pictures to draw")
    arrays = {title: np.asarray(image) for title, image in images.items()}
    for title, image in arrays.items():
        if image.ndim != 2:
            raise ValueError(f"{title!r} has {image.ndim} dimensions, but must have 2")
    rows = -(-len(arrays) // columns)
    fig = new_figure(size, _CELL * rows + 0.2)
    largest = max(np.abs(image).max() for image in arrays.values()) or 1.0
    axes = fig.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(arrays) :]:
        ax.set_visible(False)
    for ax, (title, image) in zip(axes.flat, arrays.items(), strict=False):
        drawn = ax.imshow(
            image, cmap=_SIGNS, norm=Normalize(-largest, largest), interpolation="none"
        )
        ax.set_title(title, size=9)
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set(visible=True, alpha=0.3)
    fig.colorbar(drawn, ax=axes, label=label, shrink=0.8)
    return fig
