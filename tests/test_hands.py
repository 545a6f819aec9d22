"""What a reader does on a page: guess, and operate figures by mouse, touch and keys."""

import random
from dataclasses import replace

import pytest
import torch
from browsing import REVEAL, barriers, new_context
from test_pages import show, watch

from cdopt_tutorial.dissolving import plane
from cdopt_tutorial.parameter_server import RNNConfig, traffic
from cdopt_tutorial.sharding import costs

# Beside the group "book", which takes as long.
pytestmark = pytest.mark.xdist_group("hands")

GUESSED = "notebooks/06_shards.html"  # whose numbers are the same everywhere
PLANE = "notebooks/03_constraint_dissolving.html"
FIGURES = {
    "01_reinforce": ["timeline", "timeline", "observers"],
    "02_parameter_server": ["step", "cuts"],
    "03_constraint_dissolving": ["plane"],
    "04_constrained_rnn": ["timeline"],
    "05_ddp_rpc": ["moves", "timeline"],
    "06_shards": ["shards"],
}


@pytest.fixture
def page(page, server):
    """A page on which nothing may go wrong."""
    watch(page, server, faults := [])
    yield page
    assert faults == []


def form(page, name):
    """A question, and the cell with its measured answer."""
    answer = page.locator(f"details.guess[data-name='{name}']")
    cell = answer.locator("xpath=ancestor::div[contains(@class, 'cell ')][last()]")
    place = cell.locator("xpath=preceding-sibling::div[@class='guess-place'][1]")
    return place, cell


def test_a_number_is_guessed_compared_and_kept(page, server):
    page.goto(f"{server}/{GUESSED}")
    place, cell = form(page, "06-guess-bytes")
    assert place.is_visible() and not cell.is_visible()
    for none in "", "1,96", "1/2":
        place.get_by_label("Your guess:").fill(none)
        place.get_by_role("button", name="Compare").click()
        assert not cell.is_visible()
    place.get_by_label("Your guess:").fill("16384")
    place.get_by_label("Your guess:").press("Enter")
    said = "Your guess: 16384 bytes Measured: 32,768 bytes A factor of 2.0 too low."
    assert " ".join(place.inner_text().split()).startswith(said)
    page.reload()
    assert cell.is_visible() and "16384" in place.inner_text()
    place.get_by_role("button", name="Guess again").click()
    assert not cell.is_visible()
    page.evaluate("localStorage['guess 06-guess-bytes'] = 'odd'")
    page.reload()
    for guess, said in {
        "32768": "Exactly.", "32700": "Within 1 %.", "50000": "53 % too high.",
        "3e5": "A factor of 9.2 too high.", "-1": "Off by 33000.",
        "32767": "1 too low.",
    }.items():  # fmt: skip
        place.get_by_label("Your guess:").fill(guess)
        place.get_by_role("button", name="Compare").click()
        assert said in place.inner_text()
        place.get_by_role("button", name="Guess again").click()
    place.get_by_role("button", name="without a guess").click()
    assert cell.is_visible() and "Your guess" not in place.inner_text()


def test_a_choice_is_made_by_keys_and_locks_nothing_behind_its_section(page, server):
    page.goto(f"{server}/{PLANE}")
    place, cell = form(page, "03-guess-star")
    page.evaluate(REVEAL)
    place.get_by_role("button", name="Guess again").click()
    assert not cell.is_visible()
    assert page.get_by_role("heading", name="Matrices").is_visible()
    place.get_by_role("radio").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert "That is what was measured." in place.inner_text()
    assert cell.is_visible()


def test_a_link_and_a_button_open_what_is_locked_but_no_more(page, server):
    page.goto(f"{server}/{PLANE}")
    hidden = page.locator(".bd-article [class*='locked-']")
    forms, count = page.locator(".guess-form"), hidden.count()
    assert forms.count() > 2
    assert "is hidden until then" in forms.first.inner_text()
    # The second question of a section waits for the first.
    first, second = (page.locator(".guess-place").nth(number) for number in (0, 1))
    assert first.is_visible() and not second.is_visible()
    page.evaluate("document.querySelector(\"[class*='locked-']\").id = 'here'")
    page.evaluate("location.hash = 'here'")
    page.wait_for_function(
        "!document.getElementById('here').matches(\"[class*='locked-']\")"
    )
    assert second.is_visible() and 0 < hidden.count() < count
    page.get_by_role("button", name="Show all on this page").first.click()
    assert hidden.count() == forms.count() == 0


def test_whoever_has_no_script_and_whoever_prints_has_all(browser, page, server):
    plain = new_context(browser, java_script_enabled=False).new_page()
    plain.goto(f"{server}/{PLANE}")
    folded = plain.locator("details.guess")
    assert folded.count() >= 2 and folded.first.is_visible()
    assert plain.locator("figure[data-turn] > div").first.is_visible()
    page.goto(f"{server}/{PLANE}")
    page.emulate_media(media="print")
    assert page.locator("[class*='locked-']").first.is_visible()


@pytest.mark.parametrize("chapter", FIGURES)
def test_each_figure_answers_to_keys(page, server, chapter):
    rules = ["label", "button-name", "select-name", "svg-img-alt"]
    show(page, "phone", "dark")
    page.goto(f"{server}/notebooks/{chapter}.html")
    assert barriers(page, {"runOnly": rules}, ".guess-place") == []
    page.evaluate(REVEAL)
    figures = page.locator("figure[data-turn]")
    kinds = [figure.get_attribute("data-turn") for figure in figures.all()]
    assert kinds == FIGURES[chapter]
    for figure in figures.all():
        assert not figure.locator("> div").first.is_visible()  # the still one
        for knob in figure.locator(".turn-controls :is(input, select)").all():
            seen = {figure.inner_text()}
            knob.focus()
            for key in ("ArrowUp", "ArrowDown", "ArrowDown"):  # it may be at an end
                page.keyboard.press(key)
                seen.add(figure.inner_text())
            assert len(seen) > 1
    # `test_pages` asks about the rest.
    assert barriers(page, {"runOnly": rules}, "figure[data-turn]") == []


def test_the_start_of_a_path_is_moved_in_the_picture(page, server):
    page.goto(f"{server}/{PLANE}")
    page.evaluate(REVEAL)
    figure = page.locator("figure[data-turn=plane]")
    figure.scroll_into_view_if_needed()
    box = figure.locator("svg.square").bounding_box()
    send = page.context.new_cdp_session(page).send
    kind = "touchStart"
    for x, y in (-1.3, 1.2), (-0.5, 0.6), (0.4, 0):  # a finger, on the plane
        right = box["x"] + (x + 1.8) / 3.6 * box["width"]
        down = box["y"] + (1.8 - y) / 3.6 * box["height"]
        where = {"touchPoints": [{"x": right, "y": down}]}
        send("Input.dispatchTouchEvent", {"type": kind, **where})
        page.evaluate(TWO_FRAMES)  # or the browser would merge several
        kind = "touchMove"
    send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    knobs = figure.locator(".turn-controls input")
    start = [float(knobs.nth(k).get_attribute("aria-valuetext")) for k in (2, 3)]
    assert start == pytest.approx([0.4, 0], abs=0.06)


TWO_FRAMES = """() => new Promise((done) =>
    requestAnimationFrame(() => requestAnimationFrame(done)))"""


def test_a_step_is_walked_by_clicks_and_calls_by_arrow_keys(page, server):
    page.goto(f"{server}/notebooks/02_parameter_server.html")
    page.evaluate(REVEAL)
    step = page.locator("figure[data-turn=step]")
    back, forward = (step.get_by_role("button", name=n) for n in ("Back", "Forward"))
    assert back.is_disabled() and "looks up" in step.locator(".turn-text").inner_text()
    for _ in range(12):
        forward.click()
    assert forward.is_disabled() and "Optimizer" in step.inner_text()
    back.click()
    assert step.locator("text.now").all_text_contents() == ["lookup"]
    page.goto(f"{server}/notebooks/05_ddp_rpc.html")
    page.evaluate(REVEAL)
    timeline = page.locator("figure[data-turn=timeline]")
    timeline.locator(".turn-picture > svg").focus()
    page.keyboard.press("ArrowRight")
    first = timeline.locator(".turn-text").inner_text()
    page.keyboard.press("ArrowRight")
    second = timeline.locator(".turn-text").inner_text()
    assert first != second and "took" in first and "took" in second
    assert timeline.get_by_label("B there and back").count()  # " B", or " kB"


@pytest.fixture(scope="module")
def computed(context, server):
    """Calls one of the models behind the page's figures."""
    page = context.new_page()
    page.goto(f"{server}/{PLANE}")
    return lambda name, *args: page.evaluate(f"a => turn.models.{name}(...a)", args)


def some_numbers(number=20):
    return [random.Random(seed) for seed in range(number)]


def test_speeds_are_those_of_the_chapter(computed):
    for dice in some_numbers():
        cost, added, own = (10 ** dice.uniform(-2, 1) for _ in range(3))
        observers, cores = dice.randint(1, 16), dice.randint(1, 16)
        how = {"cost": cost, "added": added, "observers": observers, "cores": cores}
        found = computed("stepsPerSecond", how, {"own": own})
        step = cost + own  # in ms; observers with a core each step at the same time
        together = step * max(1, observers / cores) + added
        paces = {"alone": 1000 / step, "together": 1000 * observers / together}
        assert found == pytest.approx(paces)


def test_bytes_of_cuts_are_those_of_the_package(computed):
    for dice in some_numbers():
        vocab, width = dice.randint(2, 10**5), dice.randint(1, 2000)
        size = {"seq_len": dice.randint(1, 99), "batch_size": dice.randint(1, 99)}
        found = computed("bytesOfCuts", {"vocab": vocab, "width": width, **size})
        config = RNNConfig(embedding=width, hidden=width, **size)
        for cut in ("logits", "loss"):
            of_cut = replace(config, cut=cut)
            assert found[cut] == traffic.expected_bytes(of_cut, vocab)


def test_paths_and_minima_are_those_of_the_package(computed):
    for dice in some_numbers(6):
        beta, lr = 10 ** dice.uniform(-1.5, 1), 10 ** dice.uniform(-3, -2)
        start = [dice.uniform(-1.5, 1.5), dice.uniform(-1.5, 1.5)]
        for mapped, of in ((True, plane.dissolved), (False, plane.penalised)):
            how, function = {"beta": beta, "mapped": mapped}, of(plane.objective, beta)
            found = computed("descend", how, start, lr, 50)
            path = torch.tensor(found, dtype=torch.float64)
            expected = plane.descend(function, start, lr, 50)
            torch.testing.assert_close(path, expected, rtol=0, atol=1e-9)
            value = computed("valueAt", expected[-1].tolist(), how)
            assert value == pytest.approx(function(expected[-1]).item())
            points = plane.stationary_points(function)
            least = plane.curvatures(function, points)[:, 0] > 1e-3
            off = plane.constraint(points).abs() > 1e-3
            there = sorted(points[least & off].tolist())
            minima = sorted(computed("minimaOffCircle", how))
            assert minima == [pytest.approx(point, abs=1e-3) for point in there]


def test_costs_are_those_of_the_package(computed):
    for dice in some_numbers():
        n, p, ranks = dice.randint(1, 10**6), dice.randint(1, 999), dice.randint(1, 64)
        found = computed("shardCosts", {"n": n, "p": p, "ranks": ranks, "bytes": 4})
        for way, cost in costs.predicted(n, p, ranks, 4).items():
            assert found[way] == pytest.approx(cost._asdict())


def test_a_row_moves_as_torch_moves_it(computed):
    for dice in some_numbers():
        shares = [dice.randint(1, 8) for _ in range(dice.randint(1, 4))]
        labels = torch.tensor([dice.randint(0, 1) for _ in range(sum(shares))])
        row, bias = (torch.zeros(n, requires_grad=True) for n in (1, 2))
        moves = []
        for part in (labels, *labels.split(shares)):
            scores = torch.stack([row.expand(len(part)), 0 * row.expand(len(part))], 1)
            loss = torch.nn.functional.cross_entropy(scores + bias, part)
            r, b = torch.autograd.grad(loss, (row, bias))
            moves.append((-r.item(), -b[0].item()))
        whole, *parts = moves
        rows, biases = zip(*parts, strict=True)
        sums, names = (sum(rows), sum(biases) / len(parts)), ("row", "bias")
        found = computed("moves", {"labels": labels.tolist(), "shares": shares})
        for way, move in ("one process", whole), ("exact", whole), ("original", sums):
            assert [found[way][n] for n in names] == pytest.approx(move, abs=1e-6)
