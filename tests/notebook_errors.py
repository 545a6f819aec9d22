"""Errors that a notebook shows, and whether the cell that shows one announced it."""

import re

ANNOUNCED = {"prints-error", "raises-exception"}
"""Tags of cells that show an error on purpose: printed, or raised."""

# The last line of a traceback, an exception's repr, and a worker's failure.
ERROR = re.compile(
    r"Traceback \(most recent call last\)"
    r"|\b([A-Z]\w*)?(Error|Exception|Interrupt|Exit|StopIteration)\b *[:(]"
    r"|^\w+ (raised [A-Z]|exited with code|was killed by)"
    r"|\(stopped: \w+\)",
    re.MULTILINE,
)


def errors(cell) -> list[str]:
    """Return the lines of a code cell's outputs in which an error shows."""
    lines = [line for out in cell.outputs for line in shown(out).splitlines()]
    return [line for line in lines if ERROR.search(line)]


def shown(output) -> str:
    """Return what a reader sees of an output, as text."""
    match output.output_type:
        case "stream":
            return output.text
        case "error":
            return f"{output.ename}: {output.evalue}\n" + "\n".join(output.traceback)
    texts = [text for kind, text in output.data.items() if kind.startswith("text/")]
    # Source code that is shown may name errors.
    text = re.sub(r"^(`{3,}).*?^\1", "", "\n".join(texts), flags=re.M | re.S)
    return re.sub(r"<[^>]*>", "\n", text)


def unannounced(notebook) -> list[str]:
    """Return the errors that cells show without a tag that says so.

    And the first line of each cell whose tag says so, and that shows none.
    """
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            announced = ANNOUNCED & set(cell.metadata.get("tags", []))
            if announced and not errors(cell):
                found.append(f"shows no error: {cell.source.splitlines()[0]}")
            found += [] if announced else errors(cell)
    return found
