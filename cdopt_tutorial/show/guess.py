"""A measured answer that a reader guesses before he sees it."""

import json
from collections.abc import Sequence
from html import escape

from IPython.display import HTML, display


def guess(
    name: str,
    answer: float | str,
    *,
    unit: str = "",
    spec: str = ".3g",
    choices: Sequence[str] = (),
) -> None:
    """Put an answer on the page, which `book/_static/guess.js` locks.

    The question is the last paragraph before this cell that begins with **Predict**;
    from the first cell behind it the page hides what follows in the section, until the
    reader has entered a number or taken one of `choices`. Where no script runs, as in
    Jupyter, the answer is folded.

    Args:
        name: unique in the book, so it begins with the chapter's, as in `glue`.
        answer: what was measured: a number, or one of `choices`.
        unit: what stands behind the number.
        spec: how the number is shown, as `format` has it.
        choices: what may be taken, if the answer is no number.

    Raises ValueError if the answer is not among the choices.
    """
    if choices and answer not in choices:
        raise ValueError(f"answer is {answer!r}, but must be one of {list(choices)}")
    shown = answer if choices else format(answer, spec)
    value = answer if choices else float(answer)
    about = {"name": name, "value": value, "shown": shown, "unit": unit}
    if choices:
        about["choices"] = json.dumps(list(choices))
    data = "".join(f' data-{key}="{escape(str(v))}"' for key, v in about.items())
    measured = f"Measured: <b>{escape(shown)}</b> {escape(unit)}"
    summary = "<summary>Compare with your guess</summary>"
    content = f'<details class="tutorial-output guess"{data}>{summary}<p>{measured}</p>'
    display(HTML(f"{content}</details>"))
