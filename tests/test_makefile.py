"""The Makefile's targets: what they print, and that they do only what is needed."""

import os
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = ["-m cdopt_tutorial build"]
UPDATE = [
    "-m pip install --disable-pip-version-check -c constraints.txt -e .[book,ray,test]"
]
FRESH = ["-m venv --clear .venv", *UPDATE]


@pytest.fixture
def clone(project, tmp_path) -> Path:
    """A fresh clone, with a fake Python that only notes its arguments."""
    folder = tmp_path / "a clone"
    (folder / "cdopt_tutorial").mkdir(parents=True)
    shutil.copytree(project.root / ".ci", folder / ".ci")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(project.root / name, folder)
    fake = folder / "python"
    fake.write_text(
        "#!/bin/sh\n"
        'echo "$@" >> calls\n'
        'if [ "$1 $2" = "-m venv" ]; then mkdir -p .venv/bin; cp "$0" .venv/bin/; fi\n'
        f'[ "$1" != -c -o ! -e real ] || exec {shlex.quote(sys.executable)} "$@"\n'
        'case "$*" in *pip*) [ ! -e broken ] ;; *build) [ ! -e fails ] ;; esac\n'
    )
    fake.chmod(0o755)
    return folder


def make(folder: Path, *args: str, **env: str) -> tuple[bool, list[str], list[str]]:
    """Whether a target succeeds, what it says, and the fake Python's arguments."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")} | env
    pipes = {"capture_output": True, "text": True}
    done = subprocess.run(["make", *args], cwd=folder, env=env, **pipes)
    log = next(folder.rglob("calls"), Path())
    calls = log.read_text().splitlines() if log.is_file() else []
    if calls:
        log.unlink()
    said = [line for line in done.stderr.splitlines() if not line.startswith("make:")]
    return not done.returncode, said, [call for call in calls if ".py" not in call]


def book(folder: Path, **env: str) -> list[str]:
    """The fake Python's arguments in `make book`, which must succeed."""
    done, said, calls = make(folder, "book", "PYTHON=./python", PWD=str(folder), **env)
    assert done, said
    return calls


def test_set_up_is_done_once_and_again_when_it_must(clone):
    (clone / "broken").touch()
    assert not make(clone, "book", "PYTHON=./python")[0]
    (clone / "broken").unlink()
    (link := clone.parent / "a link").symlink_to(clone, target_is_directory=True)
    assert book(link) == FRESH + BUILD  # since it was half made
    for path in (link, clone):
        assert book(path) == BUILD
    # An environment that works outlives an update that fails.
    (clone / "broken").touch()
    for name in ("constraints.txt", "pyproject.toml"):
        os.utime(clone / name, (2e9, 2e9))
        for path in (clone, link):
            done, said, calls = make(path, "book", "PYTHON=./python", PWD=str(path))
            assert not done and calls == UPDATE  # nothing is cleared, or built
    (clone / "broken").unlink()
    assert book(clone) == UPDATE + BUILD
    moved = clone.rename(clone.parent / "elsewhere")
    assert book(moved) == FRESH + BUILD
    assert book(shutil.copytree(moved, clone.parent / "a copy")) == FRESH + BUILD


@pytest.mark.parametrize("port", ["taken", "80800"])
def test_a_port_that_cannot_be_had_is_one_line_before_anything_is_built(clone, port):
    book(clone)
    (clone / "real").touch()  # as the code that tries the port must be
    with socket.create_server(("127.0.0.1", 0)) as other:
        if port == "taken":
            port = str(other.getsockname()[1])
        done, said, calls = make(clone, "serve", f"PORT={port}")
    what = f"port {port} is taken, or none: name another with make serve PORT=..."
    assert not done and said == [what]
    assert not [call for call in calls if "-m" in call]


@pytest.mark.parametrize("there", [True, False])
def test_the_pages_that_are_there_are_served_though_a_chapter_failed(clone, there):
    book(clone)
    (clone / "fails").touch()
    if there:
        (clone / "_build/html").mkdir(parents=True)
        (clone / "_build/html/index.html").touch()
    done, _, calls = make(clone, "serve", "PORT=8765")
    wanted = "-m http.server --bind 127.0.0.1 --directory _build/html 8765"
    assert done == there and (wanted in calls) == there


def test_clean_removes_only_what_make_built(clone):
    book(clone)
    before = {path.name for path in clone.iterdir()} - {".venv"}
    for built in ("_build/html", ".ruff_cache", "cdopt_tutorial/__pycache__", "tests"):
        (clone / built).mkdir(parents=True)
    assert make(clone, "clean")[0]
    assert {p.name for p in clone.iterdir()} == before | {"tests"}
    assert not (clone / "cdopt_tutorial" / "__pycache__").exists()


DISK = "os.statvfs = lambda p: type('D', (), {'f_bavail': 1e6, 'f_frsize': 1024})"
LACKS = {
    "sys.version_info = (3, 9, 1)": "Python is 3.9: 3.11 is needed",
    DISK: "1.0 GB of disk are free here: 4 GB are needed",
    "pass": "",
}


@pytest.mark.parametrize("lack, words", LACKS.items())
def test_what_is_missing_is_said_in_one_line(project, lack, words):
    code = f"import os, runpy, sys; {lack};"
    code += "runpy.run_path('.ci/preflight.py', run_name='__main__')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=project.root, capture_output=True, text=True)
    assert done.returncode == bool(words)
    assert words in done.stderr and len(done.stderr.splitlines()) == bool(words)
