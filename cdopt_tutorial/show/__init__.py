"""What a chapter shows: HTML that works offline and stays on the page."""

import hashlib
import io
import json
import platform
import re
from collections.abc import Sequence
from datetime import date
from html import escape
from importlib.metadata import version
from importlib.resources import files
from statistics import fmean
from time import monotonic

import torch
from IPython.display import HTML, display
from joblib import cpu_count
from matplotlib.figure import Figure

from cdopt_tutorial.calls.device import gpus_of
from cdopt_tutorial.plots.style import INK, SERIES, styled

HIDDEN = "application/papermill.record/"  # as `publish.chapter` reads it
PHONE = 340  # pixels for a figure there


def glue(name: str, value: object) -> None:
    """Keep a number or a text for the role ``glue:text``, as `myst_nb.glue` does.

    The name begins with the chapter's number, as a page finds only such a figure.
    Raises ValueError if the value is neither; of a numpy scalar or a tensor, the item.
    """
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, bool) or not isinstance(value, float | int | str):
        raise ValueError(f"{name} is {value!r}, but must be a number or a text")
    about = {"scrapbook": {"name": name, "mime_prefix": HIDDEN}}
    display({f"{HIDDEN}text/plain": repr(value)}, metadata=about, raw=True)


def glue_runs(name: str, results: Sequence[float]) -> None:
    """Glue the mean of several runs and, as "NAME, range", the least to the most."""
    glue(name, fmean(results))
    glue(f"{name}, range", f"{min(results):.1f} to {max(results):.1f}")


def guess(
    name: str,
    answer: float | str,
    *,
    unit: str = "",
    spec: str = ".3g",
    choices: Sequence[str] = (),
    found: str = "Measured",
) -> None:
    """Put an answer on the page, which `book/_static/guess.js` locks.

    The question is the last paragraph before this cell that begins with **Predict**.
    Without scripts, as in Jupyter, the answer is folded.

    The `name` is unique in the book, as in `glue`. The `answer` is what was measured: a
    number, shown by `spec` of `format` and followed by its `unit`, or one of `choices`.
    `found` says how, where it was computed.
    """
    shown = str(answer) if choices else format(answer, spec)
    value = answer if choices else float(answer)
    about = {"name": name, "value": value, "shown": shown, "unit": unit}
    about["found"] = found
    if choices:
        about["choices"] = json.dumps(list(choices))
    data = "".join(f' data-{key}="{escape(str(v))}"' for key, v in about.items())
    measured = f"{escape(found)}: <b>{escape(shown)}</b> {escape(unit)}"
    summary = "<summary>Compare with your guess</summary>"
    content = f'<details class="tutorial-output guess"{data}>{summary}<p>{measured}</p>'
    display(HTML(f"{content}</details>"))


def environment(device: str = "cpu") -> HTML:
    """Show what the chapter ran on; `device` is a name of torch's, or "auto"."""
    gpus = gpus_of("cuda" if device == "auto" else device)
    named = [f"{gpu} {torch.cuda.get_device_name(gpu)}" for gpu in gpus]
    where = ", ".join([*named, f"CUDA {torch.version.cuda}"]) if named else "cpu"
    facts = {"Python": platform.python_version()}
    facts |= {name: version(name) for name in ("torch", "gymnasium", "cdopt")}
    facts |= {"device": where, "cores": cpu_count(), "date": f"{date.today()}"}
    line = " · ".join(f"<b>{name}</b> {escape(str(f))}" for name, f in facts.items())
    return HTML(f'<p class="tutorial-output" style="font-size:0.85em">{line}</p>')


class Progress:
    """A bar that is full at `total`, and stays on the page."""

    def __init__(self, total: float, label: str):
        self._total, self._label, self._next = total, label, 0.0
        self._handle = display(self._bar(0, ""), display_id=True)

    def update(self, value: float, text: str = "") -> None:
        """Move the bar, at most ten times a second, and write `text` below it."""
        if value >= self._total or monotonic() >= self._next:
            self._next = monotonic() + 0.1
            self._handle.update(self._bar(value, text))

    def _bar(self, value: float, text: str) -> HTML:
        return HTML(
            '<div class="tutorial-output" style="max-width:40em;margin:0.5em 0">'
            f'<label style="display:block">{escape(self._label)}'
            f'<progress max="{self._total:g}" value="{value:g}" '
            'style="display:block;width:100%"></progress></label>'
            f'<div style="font-size:0.85em">{escape(text)}&nbsp;</div></div>'
        )


def diagram(name: str, *, caption: str) -> HTML:
    """Show the file `show/NAME.svg`: who owns what, and the numbered messages."""
    return _figure(svg(name), caption)


def svg(name: str) -> str:
    """The element of such a file, as wide as it is drawn or, if less, as the page."""
    text = (files(__package__) / f"{name}.svg").read_text()
    # As a picture on its own it is grey; here it takes the colour of the text.
    style = "color:inherit;width:100%;height:auto;max-width:"
    width = re.findall(r' width="(\d+)"', text)[0]
    return text.replace("<svg", f'<svg style="{style}{width}px"', 1)


@styled
def figure(
    fig: Figure, *, alt: str, caption: str = "", turn: tuple[str, dict] | None = None
) -> HTML:
    """Show a figure of `plots` as one inline SVG for a light page and a dark one.

    `alt` describes it to those who can't see it. `turn` names an interactive figure of
    `book/_static/turn.js`, with the chapter's numbers for it, which takes the place of
    `fig` on a page with scripts.
    """
    buffer, absent = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    fig.savefig(buffer, format="svg", metadata=absent)
    still = _inline(buffer.getvalue(), 96 * fig.get_figwidth(), alt)
    return _figure(still, caption, turn)


def _inline(svg: str, width: float, alt: str) -> str:
    """Make matplotlib's file an element that can share a page with others."""
    inner = svg[svg.index(">", svg.index("<svg")) + 1 :]
    # A style element would reach every SVG of the page.
    inner = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", inner, flags=re.DOTALL)
    inner = re.sub(r">\s+<", "><", inner).replace(INK, "currentColor")
    # Two SVGs of a page with the same ids would use each other's clip paths.
    mark = "f" + hashlib.sha256(inner.encode()).hexdigest()[:8]
    inner = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{mark}-", inner)
    box = re.findall(r'viewBox="[^"]*"', svg)[0]
    style = f"width:100%;max-width:{width:.0f}px;"
    # Smaller than this it would be illegible; on a phone it scrolls in its frame.
    if (least := width * 2 / 3) > PHONE:
        style += f"min-width:{least:.0f}px;"
    style += "height:auto;stroke-linejoin:round;stroke-linecap:butt"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'xmlns:xlink="http://www.w3.org/1999/xlink" {box} role="img" '
        f'aria-label="{escape(alt)}" style="{style}">{inner.strip()}'
    )


def _figure(content: str, caption: str, turn: tuple[str, dict] | None = None) -> HTML:
    note = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    name = data = ""
    if turn is not None:
        # A text could contain what ends a script.
        numbers = {"colors": [look.color for look in SERIES], **turn[1]}
        text = json.dumps(numbers).replace("</", r"<\/")
        name = f' data-turn="{turn[0]}"'
        data = f'<script type="application/json">{text}</script>'
    return HTML(
        f'<figure class="tutorial-output"{name}>{data}'
        f'<div style="overflow-x:auto">{content}</div>{note}</figure>'
    )
