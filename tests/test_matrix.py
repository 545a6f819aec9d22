"""Other versions: what is installed, run and noted, by a Python that only pretends."""

import json
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path
from platform import python_version

import pytest
import tomlkit
import torch
from books import smallest_book
from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

from cdopt_tutorial import cli
from cdopt_tutorial.publish import matrix

# An interpreter that makes an environment of itself, and notes what it is asked for;
# version 9.9 of torch does not install. With seven threads no chapter can begin.
FAKE = """\
#!/bin/sh
echo "$CI$PYTHONPATH$*" >> {folder}/calls
env="$ATEN_CPU_CAPABILITY,$MKL_CBWR,$ONEDNN_MAX_CPU_ISA,$NPY_DISABLE_CPU_FEATURES"
env="$env,$OMP_NUM_THREADS,$MKL_NUM_THREADS,$MKL_DYNAMIC"
env="$env,$(grep Cpus_allowed_list /proc/self/status)"
for last; do :; done
case "$*" in
    *"torch cdopt numpy ray") echo "a warning"; cat {folder}/list ;;
    -c*) echo {version} ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"install"*torch==9.9*) echo some words; echo "no such torch"; exit 1 ;;
    *"install"*) cp "$7" {folder}/constraints ;;
    *execute*) echo "$env" >> {folder}/seen
        [ "$OMP_NUM_THREADS" = 7 ] || cp {folder}/chapters "$last"; exit 3 ;;
    *pytest*) echo "$env" >> {folder}/seen; cp {folder}/tests "$last"; exit 1 ;;
esac
"""
# What libraries take: their code path, threads, cores, and groups of instructions.
ASK = """
import os, numpy, torch
print(torch.backends.cpu.get_cpu_capability())
print(torch.get_num_threads())
print(len(os.sched_getaffinity(0)))
print(sorted(numpy.show_config("dicts")["SIMD Extensions"].get("found", [])))
"""
TABLE = """\
[01_a.figures]
near = {at_most = 9, seen = 8.0}
same = {at_most = 7, seen = 7}
speed = {machine = true, seen = 3.0}
"""
PINS = "cdopt==0.5\nJinja2==3.1\nnumpy==2.4\nnumpy-extra==1\ntorch==2.0\nsympy==1.1\n"


def chapter(error=None, **figures):
    why = error and error.splitlines()[-1]
    return {"error": error, "why": why, "seconds": 1.0, "figures": figures}


@pytest.fixture
def book(tmp_path, monkeypatch):
    book = smallest_book(tmp_path / "a book")
    (book.root / "constraints.txt").write_text(PINS)
    (book.root / "notebooks/reference.toml").write_text(TABLE)
    (book.build / "html").mkdir(parents=True)
    monkeypatch.setattr("cdopt_tutorial.publish.project.this_project", lambda: book)
    monkeypatch.setenv("PYTHONPATH", "of this one: ")
    monkeypatch.setenv("CI", "in CI, ")
    return book


@pytest.fixture
def fake(tmp_path):
    """The folder of such an interpreter, and of what it answers with."""
    folder = tmp_path / "fake"
    folder.mkdir()
    write_fake(folder, "3.12.4")
    listed = {name: f"{name}-1" for name in ("torch", "cdopt", "numpy", "ray")}
    (folder / "list").write_text(json.dumps(listed))
    write_chapters(folder, chapter(near=8.0, same=7, speed=99.0))
    write_tests(folder, "", "", "<skipped/>")
    return folder


def write_fake(folder, version):
    python = folder / "python"
    python.write_text(FAKE.format(folder=folder, version=version))
    python.chmod(0o755)


def write_chapters(folder, *chapters):
    names = ("notebooks/01_a.ipynb", "notebooks/02_b.ipynb")
    found = dict(zip(names, chapters, strict=False))
    (folder / "chapters").write_text(json.dumps({"chapters": found}))


def write_tests(folder, *inner):
    text = ""
    for number, each in enumerate(inner):
        text += f"<testcase classname='a' name='t{number}'>{each}</testcase>"
    (folder / "tests").write_text(f"<testsuites>{text}</testsuites>")


def run(fake, *versions, flags=""):
    """The exit code, and what was written of the run."""
    file, args = fake / "out.json", ["--python", str(fake / "python"), *flags.split()]
    for each in versions:
        args += ["--torch", each]
    code = cli.main(["matrix", *args, "--json", str(file)])
    return code, json.loads(file.read_text())["runs"][-1]


@pytest.mark.usefixtures("book")
class TestRun:
    def test_is_in_a_copy_with_nothing_of_this_python(self, book, fake, scratch):
        code, found = run(fake)
        assert code == 0
        (tried,) = found["environments"]
        assert tried.pop("seconds") >= 0
        assert tried == {
            "python": "3.12.4", "torch": "torch-1", "cdopt": "cdopt-1",
            "numpy": "numpy-1", "ray": "ray-1", "cpu": own_path(), "threads": 0,
            "cores": len(os.sched_getaffinity(0)),
            "chapters": "1 of 1", "tests": "2 of 2", "changes": [], "failures": [],
            "figures": {"01_a": {"near": 8.0, "same": 7, "speed": 99.0}},
        }  # fmt: skip
        asked, venv, install, _, execute, tests = calls(fake)
        assert re.fullmatch(r"-m venv /.+/env", venv)
        assert install.endswith(" -e .[book,ray,test] torch==2.0 cdopt==0.5")
        assert "execute notebooks/01_a.ipynb --force --cell-timeout 3600" in execute
        assert " -k one_process " in tests and "engines" not in tests
        # Torch chooses the others for itself.
        assert (fake / "constraints").read_text() == "numpy==2.4\nnumpy-extra==1\n"
        # Which must be there to be dropped.
        assert asked.startswith("in CI, of this one: -c ")

    def test_notes_what_moved_and_how_far_it_may(self, fake, capsys):
        write_chapters(fake, chapter(near=8.25, same=8, speed=1.0))
        code, found = run(fake)
        assert code == 3
        near, same = found["environments"][0]["changes"]
        assert near == {
            "figure": "near", "was": "8", "now": "8.25", "allowed": "at most 9",
            "holds": True,
        }  # fmt: skip
        assert (same["figure"], same["holds"]) == ("same", False)
        said = capsys.readouterr().out.splitlines()
        assert "| near | 8 | at most 9 | 8.25 |" in said
        assert "| same | 7 | at most 7 | **8** |" in said

    def test_goes_on_after_a_version_that_does_not_install(self, fake, capsys, scratch):
        code, found = run(fake, "9.9", "2.11.0")
        assert code == 1
        bad, good = found["environments"]
        assert bad["failures"] == ["installing failed: no such torch"]
        assert (bad["torch"], bad["chapters"], bad["tests"]) == ("9.9", "", "")
        assert (good["failures"], good["chapters"]) == ([], "1 of 1")
        said = capsys.readouterr()
        assert said.err == "cdopt-tutorial: 1 of 2 environments failed\n"
        assert "torch 9.9" in said.out and "installing failed: no such" in said.out

    def test_names_chapters_and_tests_that_fail(self, fake):
        error = "01_a failed in code cell 1\nKeyError: 'x'"
        write_chapters(fake, chapter(error, near=8.0), chapter())
        write_tests(fake, "", "<failure message='1 != 2&#10;x'/>", "<error/>")
        code, found = run(fake)
        (tried,) = found["environments"]
        assert code == 1 and tried["changes"] == []  # `same` was not reached
        assert (tried["chapters"], tried["tests"]) == ("1 of 2", "1 of 3")
        tests = ["a::t1 failed: 1 != 2", "a::t2 failed: no reason"]
        assert tried["failures"] == ["01_a failed: KeyError: 'x'", *tests]


def calls(fake):
    """What the interpreter was asked for."""
    return (fake / "calls").read_text().splitlines()


def own_path():
    """The code path of this CPU."""
    return torch.backends.cpu.get_cpu_capability().lower()


def allowed(cores=None):
    """How the system writes on which cores a process runs: this one, or the first."""
    if cores == 1:
        return f"Cpus_allowed_list:\t{min(os.sched_getaffinity(0))}"
    status = Path("/proc/self/status").read_text().splitlines()
    return next(each for each in status if each.startswith("Cpus_allowed_list"))


@pytest.fixture
def capable(monkeypatch):
    """Gives the CPU the code path avx512, or whichever."""

    def set_path(name="AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: name)

    set_path()
    return set_path


@pytest.mark.usefixtures("book")
class TestMachines:
    @pytest.mark.usefixtures("capable")
    def test_are_what_chapters_and_tests_see(self, fake, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS")  # that of the tests
        run(fake, flags="--cpu default --cpu avx2 --cpu avx512 --threads 3 --cores 1")
        run(fake)  # as this one is
        lines = (fake / "seen").read_text().splitlines()
        here = [name for name in __cpu_dispatch__ if __cpu_features__[name]]
        newer = [name for name in here if name != "X86_V3"]
        assert lines[::2] == lines[1::2] == [
            f"default,COMPATIBLE,SSE41,{' '.join(here)},3,3,FALSE,{allowed(1)}",
            f"avx2,AVX2,AVX2,{' '.join(newer)},3,3,FALSE,{allowed(1)}",
            f",,,,3,3,FALSE,{allowed(1)}",
            f",,,,,,,{allowed()}",
        ]  # fmt: skip

    def test_share_an_environment_and_no_result(self, fake):
        code, found = run(fake, flags="--threads 1 --threads 7 --threads 2")
        asked = calls(fake)
        assert sum("-m venv" in x for x in asked) == 1
        assert sum("--force" in x for x in asked if "execute" in x) == 3
        one, none, two = found["environments"]
        assert (one["chapters"], none["chapters"], two["chapters"]) == (
            "1 of 1", "", "1 of 1",
        )  # fmt: skip
        assert code == 1 and "running the chapters failed" in none["failures"][0]
        assert [x["numpy"] for x in found["environments"]] == ["numpy-1"] * 3

    @pytest.mark.usefixtures("capable")
    def test_are_named_where_their_figures_are_kept(self, book, fake):
        write_chapters(fake, chapter(near=8.5, new=1.0), chapter("02_b failed", x=1))
        more = "--cores 1 --no-engines --update-reference"
        run(fake, flags=f"--cpu default --cpu avx2 {more}")
        table = tomlkit.parse((book.root / "notebooks/reference.toml").read_text())
        assert list(table) == ["01_a"]
        assert table["01_a"]["figures"] == {
            "near": {"at_most": 9, "seen": [8.0, 8.5]},
            "new": {"seen": 1.0},
        }
        seen = table["01_a"]["runs"]
        for each, path in zip(seen, ("default", "avx2"), strict=True):
            assert f", {path}, 1 cores; Python 3.12.4, torch torch-1" in each
        assert calls(fake)[-1].endswith("-m not engines")

    def test_run_in_a_copy_by_this_python_if_no_version_is_named(
        self, book, fake, monkeypatch, scratch
    ):
        monkeypatch.setattr(sys, "executable", str(fake / "python"))
        file = fake / "out.json"
        assert cli.main(["matrix", "--cores", "1", "--json", str(file)]) == 0
        steps = r"-c .*", r"-m cdopt_tutorial.cli execute .*", r"-m pytest .*"
        for step, asked in zip(steps, calls(fake), strict=True):
            assert re.fullmatch(rf"/.+/project{step}", asked)
        assert not book.results.exists()
        (tried,) = json.loads(file.read_text())["runs"][0]["environments"]
        assert (tried["python"], tried["torch"]) == (python_version(), "torch-1")

    def test_have_no_more_than_this_one(self, capable, capsys, fake):
        capable("AVX2")
        refused = {
            "--cpu avx512": "cpu is 'avx512', but must be default or avx2 on this CPU",
            "--threads -1": "threads is -1, but must be at least 0",
            "--cores 0": "cores is 0, but must be from 1 to {} here",
            "--cores 1 --cores 9999": "cores is 9999, but must be from 1 to {} here",
        }
        for flags, line in refused.items():
            assert cli.main(["matrix", f"--python={fake}/python", *flags.split()]) == 2
            line = line.format(len(os.sched_getaffinity(0)))
            assert capsys.readouterr() == ("", f"cdopt-tutorial: {line}\n")
        assert not (fake / "seen").exists()

    def test_are_combined_each_once(self, capable):
        found = matrix.simulate(["default", "avx2", "default"], [1, 4], [1])
        assert [str(each) for each in found] == [
            f"cpu {cpu}, threads {threads}, cores 1"
            for cpu in ("default", "avx2") for threads in (1, 4)
        ]  # fmt: skip
        capable("SVE256")
        (own,) = matrix.simulate([], [], [1])
        assert str(own) == "cpu sve256, threads –, cores 1" and own.variables() == {}

    def test_are_obeyed_without_a_warning(self, project, tmp_path):
        """By torch and numpy themselves, in a process of this very Python."""
        if len(matrix._paths()) < 2:
            pytest.skip("this CPU has no other code path than its own")
        path = matrix._paths()[-2:-1]
        (here,) = matrix.combine(project, [], [], [])
        place = matrix.Place(tmp_path, project, here, chapters=[])
        place.copy.mkdir()
        (place.machine,) = matrix.simulate(path, [3], [1])
        said = place.call(sys.executable, "-W", "error", "-c", ASK).splitlines()
        found = {"default": [], "avx2": ["X86_V3"]}[path[0]]
        assert said == [path[0].upper(), "3", "1", f"{found}"]


class TestVersions:
    def test_are_combined_each_once(self, book, fake):
        python = str(fake / "python")
        found = matrix.combine(book, [python, python], ["2.11.0", "2.15.0+cpu"], [])
        assert [(each.python, each.torch, each.cdopt) for each in found] == [
            ("3.12.4", torch, "0.5") for torch in ("2.11.0", "2.15.0+cpu")
        ]

    def test_are_by_default_what_is_pinned_or_what_is_here(self, book):
        (pinned,) = matrix.combine(book, [], [], ["0.5.4"])
        assert str(pinned) == f"Python {python_version()}, torch 2.0, cdopt 0.5.4"
        assert pinned.interpreter == os.path.abspath(sys.executable)
        (here,) = matrix.combine(book, [], [], [])
        installed = f"torch {version('torch')}, cdopt {version('cdopt')}"
        assert str(here) == f"Python {python_version()}, {installed}"
        assert here.interpreter is None

    def test_are_nothing_else(self, book, fake):
        for bad in ("", ">=2.1", "2.13; rm", "-r x", "2.*"):
            with pytest.raises(ValueError, match="but must be a version, such as"):
                matrix.combine(book, [], ["2.13.0", bad], [])
        for bad in ("3.10.2", "2.7.18", "", "else"):
            write_fake(fake, bad)
            refused = "must be a Python here, 3.11 or newer"
            with pytest.raises(ValueError, match=refused):
                matrix.combine(book, [str(fake / "python")], [], [])


class TestFile:
    """What is written, and the table of it."""

    @pytest.mark.usefixtures("book")
    def test_tells_how_it_came_about(self, fake):
        flags = "--cpu default --threads 2 --cores 1"
        _, found = run(fake, "2.15.0", flags=flags)
        told = f"cdopt-tutorial matrix --torch 2.15.0 --python python {flags}"
        assert found["command"] == told
        text = (fake / "out.json").read_text()
        assert str(fake) not in text and found["machine"]["processor"]

    @pytest.mark.usefixtures("book")
    def test_may_begin_with_earlier_runs(self, fake, capsys):
        file = fake / "out.json"
        run(fake)
        run(fake, flags=f"--after {file} --cores 1")
        cores = [x["environments"][0]["cores"] for x in read_runs(file)]
        assert cores == [len(os.sched_getaffinity(0)), 1]
        capsys.readouterr()
        for text in ("", "{", "3"):
            (fake / "earlier").write_text(text)
            assert cli.main(["matrix", f"--after={fake}/earlier"]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert "argument --after: invalid earlier value: " in line
        assert cli.main(["matrix", f"--after={fake}/none"]) == 2
        assert "No such file" in capsys.readouterr().err


def read_runs(file):
    """The runs that a file has."""
    return matrix.runs(json.loads(file.read_text()))


def test_the_book_shows_the_pinned_torch_and_another(project):
    runs = read_runs(project.root / "book/versions.json")
    (pinned,) = matrix.combine(project, [sys.executable], [], [])
    tried = [each for run in runs for each in run["environments"]]
    torches = {each["torch"].partition("+")[0] for each in tried}
    assert pinned.torch in torches and len(torches) >= 2
    assert {each["cdopt"] for each in tried} == {pinned.cdopt}
