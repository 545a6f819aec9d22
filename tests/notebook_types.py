"""What a type checker says of the code of notebooks: names and keywords that are not.

It is lenient: of another library nothing is known, and only what would raise when
the cell runs counts.
"""

import subprocess
import sys
from pathlib import Path

from IPython.core.inputtransformer2 import TransformerManager

COUNTS = ("attr-defined", "call-arg", "import-not-found", "name-defined")

# Torch alone would take a minute; of skipped modules everything is allowed.
CONFIG = """\
[mypy]
follow_imports = skip
check_untyped_defs = true
allow_redefinition = true
[mypy-cdopt_tutorial.*]
follow_imports = silent
"""


def complaints(sources: list[str], folder: Path, root: Path, cache: Path) -> list[str]:
    """Return what is wrong in code cells, each with its file and line.

    Args:
        sources: of the code cells of one notebook.
        folder: an empty one, which the modules are written to.
        root: the folder of the package.
        cache: where the checker keeps what it knows of the package.
    """
    files = write_modules(sources, folder)
    config = folder / "mypy.ini"
    config.write_text(CONFIG)
    options = [f"--config-file={config}", f"--cache-dir={cache}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "--no-error-summary", *files],
        cwd=folder,
        env={"MYPYPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1) and not done.stderr, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    return [line for line in lines if line.endswith(tuple(f"[{c}]" for c in COUNTS))]


def write_modules(sources: list[str], folder: Path) -> list[str]:
    """Write the cells as one module, and each `%%writefile` cell as one of its own."""
    notebook, names = ["from IPython import get_ipython"], ["notebook.py"]
    for source in sources:
        first, _, rest = source.partition("\n")
        if first.startswith("%%writefile"):
            names.append(first.split()[-1])
            (folder / names[-1]).write_text(rest)
        else:
            notebook.append(TransformerManager().transform_cell(source))
    (folder / names[0]).write_text("\n".join(notebook))
    return names
