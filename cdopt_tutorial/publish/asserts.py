"""An extension of IPython: a chapter's assert that fails says what it compared."""

from typing import Any

from stack_data import FrameInfo


def load_ipython_extension(shell: Any) -> None:
    """Handle the errors of asserts; IPython calls this."""
    shell.set_custom_exc((AssertionError,), _show)


def _show(shell: Any, kind: type, error: Exception, trace: Any, tb_offset=None) -> None:
    """Show the traceback; an assert without words says its values, or their begin."""
    if not error.args:
        stack = FrameInfo.stack_data(trace)
        frames: list[Any] = [each for each in stack if isinstance(each, FrameInfo)]
        parts = frames[-1].variables_in_executing_piece
        values = [f"{part.name} = {part.value!r}" for part in parts]
        error.args = (", ".join(values)[:500],)
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
