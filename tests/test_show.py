"""What a chapter shows: offline, for light and dark, with words for every picture."""

import base64
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from datetime import date

import imageio_ffmpeg
import numpy as np
import pytest
import torch

from cdopt_tutorial import plots, show
from cdopt_tutorial.plots import style
from cdopt_tutorial.publish.project import Project


def some_figure():
    curves = {"agent": [([1, 2, 3], [0, 1, 4])]}
    return plots.learning_curves(curves, xlabel="x", ylabel="y", threshold=3)


def frames(count=6, height=30, width=41):
    rng = np.random.default_rng(0)
    return list(rng.integers(0, 256, (count, height, width, 3), dtype=np.uint8))


def test_source_names_path_and_lines_and_shows_the_code(project):
    text = show.source(Project.chapters)._repr_markdown_()
    head, code = text.split(":\n\n", 1)
    first, last = map(int, re.search(r"lines (\d+) to (\d+)$", head).groups())
    assert head.startswith("`cdopt_tutorial/publish/project.py`")
    file = project.root / "cdopt_tutorial/publish/project.py"
    lines = file.read_text().splitlines()[first - 1 : last]
    shown = code.removeprefix("````python\n").removesuffix("\n````\n").splitlines()
    assert [line.strip() for line in lines] == [line.strip() for line in shown]
    assert shown[0] == "def chapters(self) -> list[Path]:"


def test_source_sees_through_a_decorator():
    text = show.source(plots.timeline)._repr_markdown_()
    assert text.startswith("`cdopt_tutorial/plots/timeline.py`")
    assert "def timeline(" in text


@pytest.mark.parametrize("obj", [len, 3, eval("lambda: 0")])
def test_source_refuses_what_is_in_no_file(obj):
    with pytest.raises(ValueError, match="no source file"):
        show.source(obj)


def test_environment_names_what_the_chapter_ran_on():
    html = show.environment()._repr_html_()
    for word in ("Python", "torch", "gymnasium", "cdopt", "cores", "device"):
        assert f">{word}</dt>" in html
    assert date.today().isoformat() in html


@pytest.mark.parametrize(
    ("device", "names", "shown"),
    [
        ("cpu", ["A1"], "cpu"),
        ("auto", [], "cpu"),
        ("cuda", [], "cpu"),
        ("auto", ["A1"], "cuda:0 A1, CUDA 99.1"),
        ("cuda", ["A1", "B2"], "cuda:0 A1, cuda:1 B2, CUDA 99.1"),
        ("cuda:1", ["A1", "B2"], "cuda:1 B2, CUDA 99.1"),
    ],
)
def test_environment_names_the_gpus_and_their_cuda(device, names, shown, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    monkeypatch.setattr(torch.version, "cuda", "99.1")
    html = show.environment(device)._repr_html_()
    facts = re.findall(r"<dt[^>]*>(.*?)</dt><dd[^>]*>(.*?)</dd>", html)
    assert dict(facts)["device"] == shown


def test_progress_shows_its_share_and_its_text():
    bar = show.Progress(400, "solving <it>")
    bar.update(100, "reward 7")
    html = bar._repr_html_()
    assert 'aria-valuenow="100"' in html and "width:25.0%" in html
    assert "solving &lt;it&gt;" in html and "reward 7" in html
    bar.update(900)
    assert "width:100.0%" in bar._repr_html_()
    with pytest.raises(ValueError, match="above 0"):
        show.Progress(0, "nothing")


def test_progress_moves_one_display_and_leaves_its_last_state(monkeypatch):
    states = []

    class Handle:
        def update(self, bar):
            states.append(bar._repr_html_())

    monkeypatch.setattr(show, "display", lambda bar, display_id: Handle())
    with show.Progress(3, "counting") as bar:
        for k in range(1, 4):
            bar.update(k, f"at {k}")
    assert "at 3" in states[-1] and "width:100.0%" in states[-1]
    with pytest.raises(KeyError), show.Progress(3, "counting") as bar:
        bar.update(1, "at 1")
        raise KeyError
    assert "at 1 (stopped: KeyError)" in states[-1]


def test_figure_is_one_labelled_svg_in_the_colour_of_the_page():
    html = show.figure(
        some_figure(), alt="A <curve>", caption="It rises."
    )._repr_html_()
    assert html.count("<svg") == 1 == html.count("</svg>")
    assert 'role="img" aria-label="A &lt;curve&gt;"' in html
    assert "<figcaption>It rises.</figcaption>" in html
    assert "currentColor" in html and style.INK not in html
    for absent in ("<style", "<metadata", "<?xml", "<!DOCTYPE", "fill: #ffffff"):
        assert absent not in html
    svg = ElementTree.fromstring(html[html.index("<svg") : html.index("</svg>") + 6])
    assert not re.findall(r'(?:href|src)="(?!#)', html)
    assert "max-width:691px" in svg.attrib["style"]


def test_figure_needs_words():
    with pytest.raises(ValueError, match="alt text"):
        show.figure(some_figure(), alt=" ")


def test_figures_are_the_same_each_time_and_share_no_ids():
    first, again = (show.figure(some_figure(), alt="a").data for _ in range(2))
    assert first == again
    rows = [{"name": "agent", "value": 3}]
    other = show.figure(plots.bars(rows, xlabel="x"), alt="a").data
    first_ids, other_ids = (
        set(re.findall(r' id="([^"]+)"', html)) for html in (first, other)
    )
    assert first_ids and other_ids and not first_ids & other_ids
    for html, ids in ((first, first_ids), (other, other_ids)):
        used = re.findall(r'(?:href="#|url\(#)([^")]+)', html)
        assert used and set(used) <= ids


def test_video_is_part_of_the_page_and_decodes(tmp_path):
    html = show.video(frames(), fps=10, label="A <cart>", caption="c")._repr_html_()
    assert 'aria-label="A &lt;cart&gt;"' in html and "<video controls" in html
    assert "<figcaption>c</figcaption>" in html
    assert html.count("data:") == 2 and "http" not in html
    poster, mp4 = re.findall(r"data:(?:image/png|video/mp4);base64,([^\"]+)", html)
    assert base64.b64decode(poster).startswith(b"\x89PNG")
    file = tmp_path / "v.mp4"
    file.write_bytes(base64.b64decode(mp4))
    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    info = subprocess.run([ffmpeg, "-i", file], capture_output=True, text=True).stderr
    assert "h264" in info and "yuv420p" in info and "42x30" in info
    assert imageio_ffmpeg.count_frames_and_secs(str(file))[0] == 6


def test_video_is_the_same_each_time():
    one, two = (show.video(frames(), fps=10, label="l").data for _ in range(2))
    assert one == two


@pytest.mark.parametrize(
    "bad",
    [[], frames()[:1] + frames(1, 10), [np.zeros((4, 4, 3))], [frames()[0][..., 0]]],
)
def test_video_refuses_other_frames(bad):
    with pytest.raises(ValueError):
        show.video(bad, fps=10, label="l")


def test_glue_is_read_by_the_book_and_shown_nowhere(monkeypatch):
    left = {}
    monkeypatch.setattr(
        show, "display", lambda data, **rest: left.update(rest, data=data)
    )
    show.glue("ch1_x", 3.5)
    prefix = left["metadata"]["scrapbook"]["mime_prefix"]
    assert left["metadata"]["scrapbook"]["name"] == "ch1_x"
    assert left["data"] == {f"{prefix}text/plain": "3.5"} and left["raw"]
