"""What a chapter shows besides plain output; each function returns what to display.

All of it is offline HTML or Markdown that stays on the page after the run.
"""

import base64
import hashlib
import inspect
import io
import os
import platform
import re
import tempfile
import textwrap
import time
from collections.abc import Iterable
from datetime import date
from html import escape
from importlib.metadata import version
from pathlib import Path

import imageio_ffmpeg
import numpy as np
from IPython.display import HTML, Markdown, display
from matplotlib.figure import Figure
from PIL import Image

from cdopt_tutorial.plots.style import INK, styled
from cdopt_tutorial.publish.chapter import HIDDEN
from cdopt_tutorial.publish.project import Project

_LEGIBLE_WIDTH = 460
"""CSS pixels below which a figure scrolls in its frame instead of shrinking."""


def source(*objects) -> Markdown:
    """Show the source of classes or functions as it is in the package now.

    Returns:
        for each, its path and lines, and a code block.

    Raises:
        ValueError: the source is not in a file, so there is no path to show.
    """
    return Markdown("\n".join(map(_source, objects)))


def _source(obj) -> str:
    try:
        lines, first = inspect.getsourcelines(obj)
        file = Path(inspect.getsourcefile(inspect.unwrap(obj)))
    except (TypeError, OSError):
        raise ValueError(
            f"{obj!r} has no source file: show things of the package"
        ) from None
    last = first + len(lines) - 1
    shown = Project(Path(__file__).resolve().parents[2]).relative(file)
    code = textwrap.dedent("".join(lines)).rstrip()
    return f"`{shown}`, lines {first} to {last}:\n\n````python\n{code}\n````\n"


def glue(name: str, value: object) -> None:
    """Keep a value of the run under a name, for the prose to quote.

    The prose quotes it by the role ``glue:text``, with a format such as ``:.1f``
    behind the name; nothing is shown where this is called. It leaves what
    `myst_nb.glue` leaves, without needing the book's tools.

    Args:
        name: unique in the book, so it begins with the chapter's.
        value: a number or a text.
    """
    display(
        {f"{HIDDEN}text/plain": repr(value)},
        metadata={"scrapbook": {"name": name, "mime_prefix": HIDDEN}},
        raw=True,
    )


def environment(device: str = "cpu") -> HTML:
    """Show what the chapter was run on, for the foot of a page.

    Args:
        device: on which it computed, by torch's name, or "auto".
    """
    cores = len(os.sched_getaffinity(0))
    facts = {"Python": platform.python_version()}
    facts |= {name: version(name) for name in ("torch", "gymnasium", "cdopt")}
    facts |= {
        "device": _device(device),
        "cores": str(cores),
        "date": date.today().isoformat(),
    }
    cells = "".join(
        '<div style="margin-right:1.6em">'
        f'<dt style="font-weight:600;margin:0">{escape(name)}</dt>'
        f'<dd style="margin:0">{escape(value)}</dd></div>'
        for name, value in facts.items()
    )
    style = "display:flex;flex-wrap:wrap;font-size:0.85em;margin:1em 0"
    return HTML(f'<dl class="tutorial-output" style="{style}">{cells}</dl>')


def _device(name: str) -> str:
    """Say which device that is: its name, and what is behind it."""
    import torch  # here, since most of what this module shows does without

    # Without a GPU all is on the CPU, or the chapter did not come this far.
    if name == "cpu" or not torch.cuda.is_available():
        return "cpu"
    _, _, number = name.partition(":")
    numbers = [int(number)] if number else range(torch.cuda.device_count())
    gpus = [f"cuda:{n} {torch.cuda.get_device_name(n)}" for n in numbers]
    return ", ".join([*gpus, f"CUDA {torch.version.cuda}"])


class Progress:
    """A bar that moves while a cell runs, and whose last state stays on the page.

    To be used as a context manager; leaving it with an exception says so.

    Args:
        total: the value at which the bar is full.
        label: what is going on, in a few words.
    """

    _MIN_INTERVAL = 0.1

    def __init__(self, total: float, label: str) -> None:
        if total <= 0:
            raise ValueError(f"total is {total}, but must be above 0")
        self._total = total
        self._label = label
        self._value = 0.0
        self._text = ""
        self._shown_at = float("-inf")
        self._handle = None

    def __enter__(self) -> "Progress":
        self._handle = display(self, display_id=True)
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self._text = f"{self._text} (stopped: {kind.__name__})".strip()
        self._show()

    def update(self, value: float, text: str = "") -> None:
        """Move the bar to `value` of `total`, and write `text` beside it."""
        self._value, self._text = value, text
        now = time.monotonic()
        # A page keeps only the last state: more updates than seen are a cost.
        if now - self._shown_at >= self._MIN_INTERVAL:
            self._shown_at = now
            self._show()

    def _show(self) -> None:
        if self._handle is not None:
            self._handle.update(self)

    def _repr_html_(self) -> str:
        share = min(1.0, max(0.0, self._value / self._total))
        bar = (
            f'<div role="progressbar" aria-label="{escape(self._label)}" '
            f'aria-valuemin="0" aria-valuemax="{self._total:g}" '
            f'aria-valuenow="{self._value:g}" style="border:1px solid currentColor;'
            'border-radius:4px;height:0.8em;overflow:hidden;margin:0.2em 0">'
            f'<div style="width:{100 * share:.1f}%;height:100%;background:#4696e6">'
            "</div></div>"
        )
        return (
            '<div class="tutorial-output" style="max-width:40em;margin:0.5em 0">'
            f"<div>{escape(self._label)}</div>{bar}"
            f'<div style="font-size:0.85em">{escape(self._text)}&nbsp;</div></div>'
        )

    def __repr__(self) -> str:
        return f"{self._label}: {self._value:g} of {self._total:g} {self._text}"


@styled
def figure(fig: Figure, *, alt: str, caption: str = "") -> HTML:
    """Show a figure as one inline SVG that suits a light page and a dark one.

    Args:
        fig: drawn by `plots`, or otherwise in the style sheet of the book.
        alt: what it shows, for those who can't see it.
        caption: what is written below it.

    Raises:
        ValueError: there is no alt text.
    """
    if not alt.strip():
        raise ValueError("a figure needs an alt text")
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None})
    width = 96 * fig.get_figwidth()
    svg = _inline_svg(buffer.getvalue(), width, alt)
    note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return HTML(
        '<figure class="tutorial-output">'
        f'<div style="overflow-x:auto">{svg}</div>{note}</figure>'
    )


def _inline_svg(svg: str, width: float, alt: str) -> str:
    """Turn a file of matplotlib's into an element that shares a page with others."""
    inner = svg[svg.index(">", svg.index("<svg")) + 1 :]
    inner = re.sub(r"<metadata>.*?</metadata>", "", inner, flags=re.DOTALL)
    # A style element would reach every SVG of the page.
    inner = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", inner, flags=re.DOTALL)
    inner = re.sub(r">\s+<", "><", inner).replace(INK, "currentColor")
    # Two inline SVGs with the same ids would use each other's clip paths.
    mark = "f" + hashlib.sha256(inner.encode()).hexdigest()[:8]
    inner = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{mark}-", inner)
    box = re.search(r'viewBox="[^"]*"', svg).group()
    style = (
        f"width:100%;max-width:{width:.0f}px;"
        f"min-width:{min(width, _LEGIBLE_WIDTH):.0f}px;height:auto;"
        "stroke-linejoin:round;stroke-linecap:butt"
    )
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" {box} role="img" '
        f'aria-label="{escape(alt)}" style="{style}">{inner.strip()}'
    )


def video(
    frames: Iterable[np.ndarray],
    *,
    fps: int,
    label: str,
    caption: str = "",
    poster: int = 0,
) -> HTML:
    """Show frames as a video that is part of the page and plays offline.

    Args:
        frames: arrays of shape (height, width, 3), uint8, all alike.
        fps: frames per second.
        label: what the video shows, for those who can't see it.
        caption: what is written below it.
        poster: index of the frame that is shown before it plays.

    Raises:
        ValueError: no frames, no label, or a frame of another shape or type.
    """
    frames = [np.asarray(frame) for frame in frames]
    if not frames or not label.strip():
        raise ValueError("a video needs frames and a label")
    shape = frames[0].shape
    if any(f.shape != shape or f.dtype != np.uint8 for f in frames) or shape[2:] != (
        3,
    ):
        raise ValueError("frames must be uint8 arrays of one shape (height, width, 3)")
    image = io.BytesIO()
    Image.fromarray(frames[poster]).save(image, "png", optimize=True)
    note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return HTML(
        '<figure class="tutorial-output"><video controls playsinline muted '
        f'width="{shape[1]}" height="{shape[0]}" aria-label="{escape(label)}" '
        f'poster="{_data_uri("image/png", image.getvalue())}" '
        'style="max-width:100%;height:auto" '
        f'src="{_data_uri("video/mp4", _mp4(frames, fps))}"></video>{note}</figure>'
    )


def _mp4(frames: list[np.ndarray], fps: int) -> bytes:
    """Encode frames as H.264, which every browser plays, the same bytes each time."""
    height, width = frames[0].shape[:2]
    # yuv420p halves the colour's resolution, so both sides must be even.
    pad = ((0, height % 2), (0, width % 2), (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "video.mp4")
        writer = imageio_ffmpeg.write_frames(
            path,
            (width + width % 2, height + height % 2),
            fps=fps,
            codec="libx264",
            pix_fmt_out="yuv420p",
            macro_block_size=2,
            output_params=["-crf", "28", "-preset", "slow", "-threads", "1"]
            + ["-movflags", "+faststart", "-fflags", "+bitexact"]
            + ["-flags:v", "+bitexact", "-map_metadata", "-1"],
        )
        writer.send(None)
        for frame in frames:
            writer.send(np.ascontiguousarray(np.pad(frame, pad, mode="edge")))
        writer.close()
        return path.read_bytes()


def _data_uri(kind: str, content: bytes) -> str:
    """Return `content` as an address that needs no file and no network."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"
