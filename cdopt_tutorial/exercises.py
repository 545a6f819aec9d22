"""What checks a reader's attempt at an exercise: the comparison with a twin.

In a chapter, the cell below an attempt has the twin, in plain torch or numpy: a
generator that takes the attempt and yields a sentence for each difference. Jupyter
shows that cell folded, and the pages don't show it.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from cdopt_tutorial.run import Role, Trace, WorkerError, launch, serve

DEADLINE = 120.0  # seconds for an attempt's workers, on a busy machine, too


def check(twin: Callable[[Any], Iterator[str]], attempt: Any) -> None:
    """Print "right", or a sentence: what differs first from the twin, or was raised.

    Called in a notebook; an attempt that is still ``...`` prints nothing.
    """
    if attempt is ...:
        return
    try:
        said = next(filter(None, twin(attempt)), "right")
    except WorkerError as error:
        *_, last = ["", *error.details.splitlines()]  # of a traceback: "Error: text"
        said = ": ".join(filter(None, (error.headline, last.partition(": ")[2])))
    except Exception as error:  # where the twin takes it apart
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        said = f"the attempt is not of the form that is asked for: {text}"
    print(said)


def play(*serving: str, trace: Trace | None = None, **calls: tuple) -> dict[str, Any]:
    """Run a role for each call, a function and its arguments, and others that serve.

    Returns what each role returned, and raises WorkerError as ``launch`` does, also
    when one of them hangs: a function of an attempt is called by workers only.
    """
    roles = {name: Role(call[0], call[1:]) for name, call in calls.items()}
    roles |= dict.fromkeys(serving, Role(serve))
    return launch(roles, deadline=DEADLINE, trace=trace)


def differs(
    case: str,
    attempt: Any,
    twin: Any,
    mistakes: Mapping[str, Any] | None = None,
    tol: float = 1e-5,
) -> str:
    """A sentence that begins with the case, if attempt and twin differ; else nothing.

    They may be numbers, within ``tol`` of each other, tensors, or anything that can be
    compared. ``mistakes`` says in words what leads to a certain wrong result.
    """
    if _same(attempt, twin, tol):
        return ""
    known = (mistakes or {}).items()
    because = [reason for reason, wrong in known if _same(attempt, wrong, tol)]
    return ": ".join(
        [f"{case} {_shown(attempt)}, and not {_shown(twin)}", *because[:1]]
    )


def _same(one: Any, other: Any, tol: float) -> bool:
    try:
        one, other = (torch.as_tensor(x).detach().double() for x in (one, other))
    except (TypeError, ValueError, RuntimeError):  # they are no numbers
        return type(one) is type(other) and one == other
    return one.shape == other.shape and torch.allclose(one, other, tol, tol)


def _shown(value: Any) -> str:
    """Numbers with six digits, and anything else as it is, in one line."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else f"{value!r}"
