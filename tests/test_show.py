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


@pytest.mark.parametrize(
    ("device", "names", "shown"),
    [
        ("cpu", ["A1"], "cpu"),
        ("auto", [], "cpu"),
        ("auto", ["A1", "B2"], "cuda:0 A1, cuda:1 B2, CUDA 99.1"),
        ("cuda:1", ["A1", "B2"], "cuda:1 B2, CUDA 99.1"),
    ],
)
def test_environment_names_what_the_chapter_ran_on(device, names, shown, monkeypatch):
    named = {f"cuda:{n}": name for n, name in enumerate(names)}.__getitem__
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", named)
    html = show.environment(device)._repr_html_()
    assert f"<b>device</b> {shown} ·" in html and date.today().isoformat() in html
    for word in ("Python", "torch", "gymnasium", "cdopt", "cores"):
        assert f"<b>{word}</b>" in html


def test_progress_is_a_labelled_bar_that_moves_ten_times_a_second(monkeypatch):
    shown = []
    handle = SimpleNamespace(update=lambda bar: shown.append(bar._repr_html_()))
    # IPython has a handle for what has an id.
    monkeypatch.setattr(show, "display", lambda _, display_id: display_id and handle)
    monkeypatch.setattr(show, "monotonic", lambda: bar.value / 128)  # seconds
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
class TestDiagram:
    def test_is_on_a_page_in_its_colour(self, path, project):
        code = "".join(chapter.read_text() for chapter in project.chapters())
        assert f'\\"{path.stem}\\",\\n' in code
        html = show.diagram(path.stem, caption="It <is>.").data
        svg = svg_of(html)
        style = dict(part.split(":") for part in svg.attrib["style"].split(";"))
        assert style["color"] == "inherit"
        assert style["max-width"] == f"{svg.get('width')}px"
        assert svg.attrib["role"] == "img"
        assert "<figcaption>It &lt;is&gt;.</figcaption>" in html

    def test_says_in_words_what_it_shows_and_has_ids_of_its_own(self, path):
        text = path.read_text()
        svg = ElementTree.fromstring(text)
        numbers = [e.text for e in svg.iter(f"{SVG}text") if e.get("class") == "number"]
        assert set(numbers) == set(re.findall(r"\((\d)\)", svg.attrib["aria-label"]))
        assert sorted(map(int, set(numbers))) == [*range(1, len(set(numbers)) + 1)]
        ids = re.findall(r' id="([^"]+)"', text)
        assert all(name.startswith(f"{path.stem}-") for name in ids)
        assert set(ids) == set(re.findall(r"url\(#([^)]+)\)", text))

    def test_has_the_colours_of_its_roles_which_all_can_see(self, path):
        svg = ElementTree.parse(path).getroot()
        names = [t.text for t in svg.iter(f"{SVG}text") if t.get("class") == "name"]
        for frame, name in zip(svg.iter(f"{SVG}rect"), names, strict=True):
            color = style.look(name).color
            assert {frame.attrib["fill"], frame.attrib["stroke"]} == {color}
        # As a picture by itself it can't know the page's theme.
        pages = "#ffffff", "#121212"
        assert min(contrast(svg.attrib["color"], page) for page in pages) > 3.9


def test_figures_are_labelled_in_the_page_s_colour_and_share_no_ids():
    seen = set()
    for draw, _ in FIGURES.values():
        html, again = (show.figure(draw(), alt="A <curve>").data for _ in range(2))
        assert html == again
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


def test_a_figure_with_a_turn_carries_its_numbers():
    draw, _ = next(iter(FIGURES.values()))
    turn = "plane", {"text": "</script>"}
    html = show.figure(draw(), alt="A curve", turn=turn).data
    assert html.startswith('<figure class="tutorial-output" data-turn="plane"><script')
    assert html.count("</script>") == 1  # the numbers have no end of a script


def test_an_answer_that_is_no_choice_is_refused():
    with pytest.raises(ValueError, match="answer is 'c', but must be one of"):
        show.guess("01-guess-x", "c", choices=("a", "b"))


def test_an_answer_says_whether_it_was_measured_or_computed(monkeypatch):
    shown = []
    monkeypatch.setattr(show, "display", shown.append)
    for how in {}, {"found": "Computed"}:
        show.guess("01-guess-x", 4, unit="servers", **how)
    for said, html in zip(("Measured", "Computed"), shown, strict=True):
        assert f"{said}: <b>4</b> servers" in html.data  # where there are no scripts
        assert f'data-found="{said}"' in html.data  # what guess.js says
