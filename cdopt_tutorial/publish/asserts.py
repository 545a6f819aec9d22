"""Has a chapter's assert that fails say what it compared, by an extension of IPython.

`execute` loads it into each kernel; Python itself would say `AssertionError` alone.
"""

import re
from linecache import getlines
from traceback import extract_tb, walk_tb
from typing import Any

_LONGEST = 500  # characters of a message


def load_ipython_extension(shell: Any) -> None:
    """Handle the errors of asserts; IPython calls this."""
    shell.set_custom_exc((AssertionError,), _show)


def _show(shell: Any, kind: type, error: Exception, trace: Any, tb_offset=None) -> None:
    """Show the traceback; an assert without words has its code, and what it names."""
    if not error.args:
        place, (frame, line) = extract_tb(trace)[-1], list(walk_tb(trace))[-1]
        lines = getlines(place.filename)[line - 1 : place.end_lineno]
        code = " ".join("".join(lines).split()).removeprefix("assert ")
        known = frame.f_globals | frame.f_locals
        names = [name for name in re.findall(r"\w+", code) if name in known]
        values = {name: known[name] for name in names if not callable(known[name])}
        error.args = (f"{code}: {values}"[:_LONGEST],)
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
