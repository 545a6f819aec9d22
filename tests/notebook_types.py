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


def complaints(notebooks: dict[str, list[str]], folder: Path, root: Path) -> list[str]:
    """Return what is wrong in code cells, each with its file and line.

    Args:
        notebooks: by name, the sources of the code cells.
        folder: an empty one, which the modules are written to.
        root: the folder of the package.
    """
    files = [f for each in notebooks.items() for f in write_modules(*each, folder)]
    config = folder / "mypy.ini"
    config.write_text(CONFIG)
    options = [f"--config-file={config}", f"--cache-dir={folder / 'cache'}"]
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


def write_modules(name: str, sources: list[str], folder: Path) -> list[str]:
    """Write the cells as one module, and each `%%writefile` cell as one of its own."""
    notebook = ["from IPython import get_ipython", "_exit_code = 0"]
    names = [f"of_{name}.py"]
    for source in sources:
        first, _, rest = source.partition("\n")
        if first.startswith("%%writefile"):
            names.append(first.split()[-1])
            assert not (folder / names[-1]).exists(), names[-1]
            (folder / names[-1]).write_text(rest)
        else:
            notebook.append(TransformerManager().transform_cell(source))
    (folder / names[0]).write_text("\n".join(notebook))
    return names
