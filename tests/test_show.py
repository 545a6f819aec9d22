"""What a chapter shows: offline, for light and dark, with words for every picture."""

import re
import xml.etree.ElementTree as ElementTree
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_plots import FIGURES, contrast

from cdopt_tutorial import show
from cdopt_tutorial.plots import style


def test_environment_names_what_the_chapter_ran_on(monkeypatch):
    assert "<b>device</b> cpu ·" in show.environment()._repr_html_()
    monkeypatch.setattr(show, "gpus_of", lambda device: [f"{device}:1"])
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setattr(torch.cuda, "get_device_name", {"cuda:1": "B2"}.__getitem__)
    html = show.environment("auto")._repr_html_()
    assert "<b>device</b> cuda:1 B2, CUDA 99.1 ·" in html
    assert date.today().isoformat() in html
    for word in ("Python", "torch", "gymnasium", "cdopt", "cores"):
        assert f"<b>{word}</b>" in html


def test_progress_is_a_labelled_bar_that_moves_ten_times_a_second(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda bar: shown.append(bar.data))
    # IPython has a handle for what has an id.
    monkeypatch.setattr(show, "display", lambda _, display_id: display_id and handle)
    monkeypatch.setattr(show, "monotonic", lambda: step / 128)  # seconds
    bar = show.Progress(255, "solving <it>")
    for step in range(256):
        bar.update(step, f"reward <{step}>")
    pages = [ElementTree.fromstring(html.replace("&nbsp;", "")) for html in shown]
    bars = [page.find("label").find("progress").attrib for page in pages]
    assert [int(bar["value"]) for bar in bars] == [*range(0, 256, 13), 255]
    assert {bar["max"] for bar in bars} == {"255"}
    assert pages[-1].find("label").text == "solving <it>"  # around the bar
    assert pages[-1].find("div").text == "reward <255>"


SVG = "{http://www.w3.org/2000/svg}"
DIAGRAMS = sorted(Path(show.__file__).parent.glob("*.svg"))


def svg_of(html: str) -> ElementTree.Element:
    """The one picture in what is shown, which refers to nothing outside of it."""
    assert html.count("<svg") == 1 and not re.findall(r'(?:href|src)="(?!#)', html)
    return ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)
def test_diagram_is_on_a_page_in_its_colour_and_says_what_it_shows(path, project):
    code = "".join(chapter.read_text() for chapter in project.chapters())
    assert f'\\"{path.stem}\\",\\n' in code
    html = show.diagram(path.stem, caption="It <is>.").data
    svg = svg_of(html)
    style = dict(part.split(":") for part in svg.attrib["style"].split(";"))
    assert style["color"] == "inherit"
    assert style["max-width"] == f"{svg.get('width')}px"
    assert svg.attrib["role"] == "img"
    assert "<figcaption>It &lt;is&gt;.</figcaption>" in html
    numbers = [e.text for e in svg.iter(f"{SVG}text") if e.get("class") == "number"]
    assert set(numbers) == set(re.findall(r"\((\d)\)", svg.attrib["aria-label"]))
    assert sorted(map(int, set(numbers))) == [*range(1, len(set(numbers)) + 1)]
    ids = re.findall(r' id="([^"]+)"', html)
    assert all(name.startswith(f"{path.stem}-") for name in ids)
    assert set(ids) == set(re.findall(r"url\(#([^)]+)\)", html))


@pytest.mark.parametrize("path", DIAGRAMS, ids=lambda path: path.stem)
def test_diagram_has_the_colours_of_its_roles_which_all_can_see(path):
    svg = ElementTree.parse(path).getroot()
    names = [t.text for t in svg.iter(f"{SVG}text") if t.get("class") == "name"]
    for frame, name in zip(svg.iter(f"{SVG}rect"), names, strict=True):
        color = style.look(name).color
        assert {frame.attrib["fill"], frame.attrib["stroke"]} == {color}
    # As a picture by itself it can't know the page's theme.
    pages = "#ffffff", "#121212"
    assert min(contrast(svg.attrib["color"], page) for page in pages) > 3.9


def test_figures_are_labelled_in_the_page_s_colour_and_share_no_ids():
    seen, how = set(), {"alt": "A <curve>", "turn": ("plane", {"text": "</script>"})}
    start = '<figure class="tutorial-output" data-turn="plane"><script'
    for draw, _ in FIGURES.values():
        html, again = (show.figure(draw(), **how).data for _ in range(2))
        assert html == again and html.startswith(start)
        assert html.count("</script>") == 1  # the numbers have no end of a script
        svg = svg_of(html)
        assert svg.attrib["role"] == "img" and svg.attrib["aria-label"] == "A <curve>"
        assert "currentColor" in html and style.INK not in html
        for absent in ("<style", "<metadata", "<?xml", "<!DOCTYPE", "fill: #ffffff"):
            assert absent not in html
        assert int(re.search(r"max-width:(\d+)px", svg.attrib["style"])[1]) <= 691
        ids = set(re.findall(r' id="([^"]+)"', html))
        assert ids and not ids & seen
        assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= ids
        seen |= ids


def test_an_answer_says_how_it_was_found(monkeypatch):
    shown = []
    monkeypatch.setattr(show, "display", shown.append)
    show.guess("01-guess-x", 4, unit="servers", found="Computed")
    assert "Computed: <b>4</b> servers" in shown[0].data  # where there are no scripts
    assert 'data-found="Computed"' in shown[0].data  # what guess.js says
