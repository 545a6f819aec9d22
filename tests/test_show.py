"""What a chapter shows: offline, for light and dark, with words for every picture."""

import base64
import io
import itertools
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import imageio_ffmpeg
import numpy as np
import pytest
import torch
from colours import contrast
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import TextPath
from matplotlib.transforms import Bbox
from PIL import Image

from cdopt_tutorial import plots, show
from cdopt_tutorial.plots import style


def some_figure():
    curves = {"agent": [([1, 2, 3], [0, 1, 4])]}
    return plots.learning_curves(curves, xlabel="x", ylabel="y", threshold=3)


def test_environment_names_what_the_chapter_ran_on(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    for device, names, shown in (
        ("cpu", ["A1"], "cpu"),
        ("auto", [], "cpu"),
        ("cuda", [], "cpu"),
        ("auto", ["A1"], "cuda:0 A1, CUDA 99.1"),
        ("cuda", ["A1", "B2"], "cuda:0 A1, cuda:1 B2, CUDA 99.1"),
        ("cuda:1", ["A1", "B2"], "cuda:1 B2, CUDA 99.1"),
    ):
        named = {f"cuda:{n}": name for n, name in enumerate(names)}.__getitem__
        monkeypatch.setattr(torch.cuda, "is_available", lambda names=names: bool(names))
        monkeypatch.setattr(torch.cuda, "device_count", lambda names=names: len(names))
        monkeypatch.setattr(torch.cuda, "get_device_name", named)
        html = show.environment(device)._repr_html_()
        assert f"<b>device</b> {shown} ·" in html
    for word in ("Python", "torch", "gymnasium", "cdopt", "cores"):
        assert f"<b>{word}</b>" in html
    assert date.today().isoformat() in html


@pytest.fixture
def states(monkeypatch):
    """All states that the one display of a page showed, in their order."""
    shown = []
    handle = SimpleNamespace(update=lambda bar: shown.append(bar._repr_html_()))

    def display(bar, display_id=None):
        return handle if display_id else None  # IPython has one for what has an id

    monkeypatch.setattr(show, "display", display)
    return shown


def bar_of(html: str) -> ElementTree.Element:
    """The bar in what is shown; its label stands around it."""
    page = ElementTree.fromstring(html.replace("&nbsp;", ""))
    label = page.find("label")
    return label.text, label.find("progress").attrib, page.find("div").text


def test_progress_shows_its_share_and_leaves_its_last_state(states):
    with show.Progress(400, "solving <it>") as bar:
        for k in range(101):
            bar.update(k, f"reward <{k}>")
    label, attributes, text = bar_of(states[-1])
    assert label == "solving <it>" and text == "reward <100>"
    assert (attributes["value"], attributes["max"]) == ("100", "400")
    assert "label='solving <it>', value=100, text='reward <100>'" in repr(bar)


def test_progress_moves_no_faster_than_anyone_sees(states, monkeypatch):
    now = iter([5.0, 5.05, 5.09, 5.11, 5.2])
    monkeypatch.setattr(show.time, "monotonic", lambda: next(now))
    with show.Progress(9, "counting") as bar:
        for k in range(1, 6):
            bar.update(k)
    assert [bar_of(html)[1]["value"] for html in states] == ["1", "4", "5"]


DIAGRAMS = sorted(Path(show.__file__).parent.glob("*.svg"))
every_diagram = pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)
SVG = "{http://www.w3.org/2000/svg}"


def test_every_diagram_is_on_a_page(project):
    code = "".join(path.read_text() for path in project.chapters())
    assert DIAGRAMS
    for path in DIAGRAMS:
        assert f'\\"{path.stem}\\",\\n' in code, path


@every_diagram
def test_a_diagram_takes_the_colour_of_the_page(path):
    html = show.diagram(path.stem, caption="It <is>.").data
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    style = dict(part.split(":") for part in svg.attrib["style"].split(";"))
    assert style["color"] == "inherit" and style["max-width"] == f"{svg.get('width')}px"
    assert svg.attrib["role"] == "img"
    assert "<figcaption>It &lt;is&gt;.</figcaption>" in html
    assert not re.findall(r'(?:href|src)="(?!#)', html)


@every_diagram
def test_a_diagram_says_in_words_what_it_shows(path):
    svg = ElementTree.parse(path).getroot()
    words = svg.attrib["aria-label"]
    numbers = {e.text for e in svg.iter(f"{SVG}text") if e.get("class") == "number"}
    assert numbers == set(re.findall(r"\((\d)\)", words))
    assert sorted(map(int, numbers)) == [*range(1, len(numbers) + 1)]


@every_diagram
def test_the_ids_of_a_diagram_are_its_own_and_used(path):
    text = path.read_text()
    ids = re.findall(r' id="([^"]+)"', text)
    assert all(name.startswith(f"{path.stem}-") for name in ids)
    assert set(ids) == set(re.findall(r"url\(#([^)]+)\)", text))


@every_diagram
def test_a_diagram_has_the_colours_of_its_roles_which_all_can_see(path):
    svg = ElementTree.parse(path).getroot()
    names = [t.text for t in svg.iter(f"{SVG}text") if t.get("class") == "name"]
    for frame, name in zip(svg.iter(f"{SVG}rect"), names, strict=True):
        color = style.look(name).color
        assert {frame.attrib["fill"], frame.attrib["stroke"]} == {color}
    # As a picture by itself it can't know the page's theme.
    assert min(contrast(svg.attrib["color"], c) for c in ("#ffffff", "#121212")) > 3.9


@every_diagram
def test_nothing_in_a_diagram_is_cut_or_meets(path):
    svg = ElementTree.parse(path).getroot()
    page = Bbox.from_bounds(*map(float, svg.attrib["viewBox"].split()))
    boxes = [box_of(rect) for rect in svg.iter(f"{SVG}rect")]
    words = [place_of(text) for text in svg.iter(f"{SVG}text")]
    lines = [line_of(line) for line in svg.iter(f"{SVG}line")]
    for one in boxes + words + lines:
        assert one.x0 >= page.x0 and one.x1 <= page.x1
        assert one.y0 >= page.y0 and one.y1 <= page.y1
    for one, two in itertools.combinations([*boxes, *lines], 2):
        assert not one.overlaps(two)
    for one, two in itertools.combinations(words, 2):
        assert not one.overlaps(two)
    for word in words:
        around = [box for box in boxes if box.overlaps(word)]
        assert all(box.x0 <= word.x0 and word.x1 <= box.x1 for box in around)
        assert not any(line.overlaps(word) for line in lines)


def box_of(rect) -> Bbox:
    sides = "x", "y", "width", "height"
    return Bbox.from_bounds(*(float(rect.get(side)) for side in sides))


def line_of(line) -> Bbox:
    x1, y1, x2, y2 = (float(line.get(k)) for k in ("x1", "y1", "x2", "y2"))
    return Bbox([[min(x1, x2), min(y1, y2)], [max(x1, x2), max(y1, y2)]])


def place_of(text) -> Bbox:
    """Where a text stands, in a font that is wider than most."""
    kind = text.get("class", "")
    font = FontProperties(weight="bold" if kind == "name" else "normal")
    size = 11 if kind == "number" else 13
    drawn = TextPath((0, 0), text.text, size=size, prop=font).get_extents()
    x, y = float(text.get("x")), float(text.get("y"))
    x -= 0 if kind == "label" else drawn.width / 2
    return Bbox.from_extents(x, y - drawn.y1, x + drawn.width, y - drawn.y0)


def test_figure_is_one_labelled_svg_in_the_colour_of_the_page():
    html = show.figure(some_figure(), alt="A <curve>", caption="It rises.").data
    assert html.count("<svg") == 1 == html.count("</svg>")
    assert 'role="img" aria-label="A &lt;curve&gt;"' in html
    assert "<figcaption>It rises.</figcaption>" in html
    assert "currentColor" in html and style.INK not in html
    for absent in ("<style", "<metadata", "<?xml", "<!DOCTYPE", "fill: #ffffff"):
        assert absent not in html
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    assert not re.findall(r'(?:href|src)="(?!#)', html)
    assert "max-width:691px" in svg.attrib["style"]


def test_figures_are_the_same_each_time_and_share_no_ids():
    first, again = (show.figure(some_figure(), alt="a").data for _ in range(2))
    assert first == again
    curve = {"agent": [([1, 2], [3, 4])]}
    other = plots.learning_curves(curve, xlabel="x", ylabel="y")
    other = show.figure(other, alt="a").data
    ids = [set(re.findall(r' id="([^"]+)"', html)) for html in (first, other)]
    assert all(ids) and not ids[0] & ids[1]
    for html, own in zip((first, other), ids, strict=True):
        used = re.findall(r'(?:href="#|url\(#)([^")]+)', html)
        assert used and set(used) <= own


def test_video_is_part_of_the_page_and_decodes(tmp_path):
    rng = np.random.default_rng(0)
    frames = list(rng.integers(0, 256, (6, 30, 41, 3), dtype=np.uint8))
    how = {"fps": 10, "label": "A <cart>", "caption": "c", "poster": 4}
    html, again = (show.video(frames, **how).data for _ in range(2))
    assert html == again
    assert 'aria-label="A &lt;cart&gt;"' in html and "<video controls loop" in html
    assert "<figcaption>c</figcaption>" in html
    assert html.count("data:") == 2 and "http" not in html
    poster, mp4 = re.findall(r"data:(?:image/png|video/mp4);base64,([^\"]+)", html)
    still = np.asarray(Image.open(io.BytesIO(base64.b64decode(poster))))
    np.testing.assert_array_equal(still, frames[4])
    file = tmp_path / "v.mp4"
    file.write_bytes(base64.b64decode(mp4))
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    info = subprocess.run([ffmpeg, "-i", file], capture_output=True, text=True).stderr
    assert "h264" in info and "yuv420p" in info and "42x30" in info
    assert "10 fps" in info
    assert imageio_ffmpeg.count_frames_and_secs(str(file))[0] == 6
