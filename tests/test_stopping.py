"""A run, a command or a kernel that is stopped leaves nothing, and can go on."""

import os
import signal
import sys

import psutil
import pytest
from books import smallest_book, write_chapter
from hosts import PATIENCE, wait_until
from running import LONG, Script, wait_for_end

from cdopt_tutorial.cli import STOPS


@pytest.fixture
def place(tmp_path):
    """A folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


def left(place):
    """What there is besides torch's cache, which later runs use."""
    return [p for p in place.iterdir() if not p.name.startswith("torchinductor_")]


LAUNCH = f"""
import os, signal, threading, time
from cdopt_tutorial.run import Role, launch, serve
from running import preload_little
preload_little()
both = {{"a": Role(time.sleep, ({LONG},)), "b": Role(serve)}}
"""


def test_a_kernel_that_is_interrupted_in_its_first_launches_goes_on(place):
    code = """
for moment in (0.02, 1.0):
    try:
        threading.Timer(moment, os.killpg, (0, signal.SIGINT)).start()
        launch(both)
    except KeyboardInterrupt:
        print("interrupted")
print(launch({"a": Role(serve)}))
"""
    with Script(LAUNCH + code, place) as process:
        said = "interrupted\ninterrupted\n{'a': None}\n"
        assert process.communicate(timeout=PATIENCE) == (said, "")
    assert not left(place)


COMMAND = """
import sys
from pathlib import Path
from cdopt_tutorial import cli
from cdopt_tutorial.publish import project
project.this_project = lambda: project.Project(Path({root!r}))
sys.argv[1:] = {args!r}.split()
cli.entry()
"""
ENDLESS = "reinforce --log-interval=1 --lr=1e-9 --max-episodes=10000000"


class TestCommand:
    @pytest.fixture
    def book(self, tmp_path):
        return smallest_book(tmp_path / "a book")

    def end(self, process, number, place, *others):
        """Stop it: it ends with one line and the right code, and leaves nothing."""
        below = [*process.below(), *others]
        process.send_signal(number)
        error = process.communicate(timeout=PATIENCE)[1]
        assert error == f"cdopt-tutorial: {STOPS[number]}\n"
        assert process.returncode == 128 + number
        wait_for_end(below)
        assert not left(place)

    def test_that_runs_a_chapter(self, book, place, monkeypatch):
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        file = book.root / "pid"
        daemon = f"%%bash\nsetsid sleep {LONG} > /dev/null 2>&1 &\necho $! > '{file}'"
        write_chapter(book, daemon, LAUNCH, "launch(both)")
        code = COMMAND.format(root=str(book.root), args="execute")
        with Script(code, place) as process:
            process.wait_for("[3/3]")
            wait_until(lambda: {"a", "b"} <= process.named().keys())
            daemon = psutil.Process(int(file.read_text()))
            self.end(process, signal.SIGHUP, place, daemon)
        assert not list(book.build.rglob("*.ipynb"))

    def test_that_renders(self, book, place):
        code = COMMAND.format(root=str(book.root), args="build")
        with Script(code, place) as process:
            process.wait_for("rendering")
            self.end(process, signal.SIGINT, place)

    def test_of_torchrun_that_is_killed(self, place, monkeypatch):
        for name in "TORCHELASTIC_RUN_ID", "RANK":
            monkeypatch.setenv(name, "0")
        rank = "import time; from cdopt_tutorial import cli; "
        rank += f"cli.main = lambda: print('begun', flush=True) or time.sleep({LONG}); "
        rank = [sys.executable, "-c", f"{rank}cli.entry()"]
        with Script(f"import subprocess; subprocess.run({rank})", place) as process:
            process.wait_for("begun")
            below = process.below()
            process.kill()
            wait_for_end(below)
            assert process.stderr.read() == "cdopt-tutorial: terminated\n"
        assert below and not left(place)

    def test_that_trains_and_that_nobody_shall_stop(self, place):
        """As with nohup: a signal that was ignored stays ignored."""
        deaf = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
        with Script(deaf + COMMAND.format(root="", args=ENDLESS), place) as process:
            process.wait_for("Episode")
            process.send_signal(signal.SIGHUP)
            process.wait_for("Episode")
            self.end(process, signal.SIGTERM, place)
