"""Other versions: what is installed, run and noted, by a Python that only pretends."""

import json
import os
import re
import signal
from platform import python_version
from subprocess import PIPE, Popen

import psutil
import pytest
from books import smallest_book
from running import COMMAND, wait_for_end

from cdopt_tutorial import cli
from cdopt_tutorial.publish import matrix
from cdopt_tutorial.publish.project import this_project
from cdopt_tutorial.publish.reference import Reference

# An interpreter that makes an environment of itself, and notes what it is asked for;
# version 9.9 of torch does not install, and version 3.3 takes its time.
FAKE = """\
#!/bin/sh
echo "$CI$PYTHONPATH$*" >> {folder}/calls
for last; do :; done
case "$*" in
    *"torch cdopt numpy ray") echo "a warning"; cat {folder}/list ;;
    -c*) echo {version} ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    *"install"*torch==9.9*) echo some words; echo "no such torch"; exit 1 ;;
    *"install"*torch==3.3*) exec sleep 300 ;;
    *"install"*) cp "$7" {folder}/constraints ;;
    *execute*) cp {folder}/chapters "$last"; exit 3 ;;
    *pytest*) cp {folder}/tests "$last"; exit 1 ;;
esac
"""
TABLE = """\
[01_a.smoke]
[01_a.figures]
near = {within = 0.5, smoke = 8.0}
same = {within = 0, smoke = 7}
speed = {machine = true, smoke = 3.0}
"""
PINS = "cdopt==0.5\nJinja2==3.1\nnumpy==2.4\nnumpy-extra==1\ntorch==2.0\nsympy==1.1\n"


def chapter(error=None, **figures):
    return {"error": error, "seconds": 1.0, "figures": figures}


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


def run(fake, *versions):
    """The exit code, and what was written."""
    file, args = fake / "out.json", ["--python", str(fake / "python")]
    for version in versions:
        args += ["--torch", version]
    code = cli.main(["matrix", *args, "--json", str(file)])
    return code, json.loads(file.read_text())


@pytest.mark.usefixtures("book")
class TestRun:
    def test_is_in_a_copy_with_nothing_of_this_python(self, book, fake, scratch):
        code, found = run(fake)
        assert code == 0
        (tried,) = found["environments"]
        assert tried.pop("seconds") >= 0
        assert tried == {
            "python": "3.12.4", "torch": "torch-1", "cdopt": "cdopt-1",
            "numpy": "numpy-1", "ray": "ray-1", "chapters": "1 of 1",
            "tests": "2 of 2", "changes": [], "failures": [],
        }  # fmt: skip
        asked, venv, install, _, execute, tests = calls(fake)
        assert re.fullmatch(rf"-m venv {scratch}/[^/]+/environment", venv)
        assert install.endswith(" -e .[ray,test] torch==2.0 cdopt==0.5")
        assert " --profile smoke --cell-timeout 3600 --json " in execute
        assert " -k one_process " in tests
        # Which must be there to be dropped.
        assert asked.startswith("in CI, of this one: -c ")

    def test_frees_what_torch_chooses_for_itself(self, fake):
        run(fake)
        assert (fake / "constraints").read_text() == "numpy==2.4\nnumpy-extra==1\n"

    def test_notes_what_moved_and_how_far_it_may(self, fake, capsys):
        write_chapters(fake, chapter(near=8.25, same=8, speed=1.0))
        code, found = run(fake)
        assert code == 3
        near, same = found["environments"][0]["changes"]
        assert near == {
            "figure": "near", "was": "8", "now": "8.25", "allowed": "± 0.5",
            "holds": True,
        }  # fmt: skip
        assert (same["figure"], same["holds"]) == ("same", False)
        said = capsys.readouterr().out.splitlines()
        assert "| near | 8 | ± 0.5 | 8.25 |" in said
        assert "| same | 7 | ± 0 | **8** |" in said

    def test_goes_on_after_a_version_that_does_not_install(self, fake, capsys, scratch):
        code, found = run(fake, "9.9", "2.11.0")
        assert code == 1
        bad, good = found["environments"]
        assert bad["failures"] == ["installing failed: no such torch"]
        assert (bad["torch"], bad["chapters"], bad["tests"]) == ("9.9", "", "")
        assert (good["failures"], good["chapters"]) == ([], "1 of 1")
        said = capsys.readouterr()
        assert said.err == "cdopt-tutorial: 1 of 2 environments failed\n"
        steps = [x for x in said.out.splitlines() if x.startswith("Python 3.12.4")]
        assert [step.partition("cdopt 0.5: ")[2] for step in steps] == [
            "installing", "installing failed: no such torch",
            "installing", "running the chapters", "running the equality tests",
        ]  # fmt: skip

    def test_names_chapters_and_tests_that_fail(self, fake):
        error = "01_a failed in code cell 1\nKeyError: 'x'\nkept as far as it ran: y"
        write_chapters(fake, chapter(error, near=8.0), chapter())
        write_tests(fake, "", "<failure/>", "<error/>")
        code, found = run(fake)
        (tried,) = found["environments"]
        assert code == 1 and tried["changes"] == []  # `same` was not reached
        assert (tried["chapters"], tried["tests"]) == ("1 of 2", "1 of 3")
        expected = ["01_a failed: KeyError: 'x'", "a::t1 failed", "a::t2 failed"]
        assert tried["failures"] == expected

    def test_names_what_the_chapters_could_not_begin_for(self, fake):
        (fake / "chapters").unlink()
        _, found = run(fake)
        (tried,) = found["environments"]
        assert (tried["chapters"], tried["tests"]) == ("", "")
        (failure,) = tried["failures"]
        assert failure.startswith("running the chapters failed: cp: ")

    def test_that_is_stopped_leaves_no_environment(self, fake, tmp_path):
        place = tmp_path / "temporary"
        place.mkdir()
        command = [*COMMAND, "matrix", "--torch=3.3", f"--python={fake}/python"]
        env = os.environ | {"TMPDIR": str(place)}
        env.pop("PYTHONPATH")
        with Popen(command, env=env, stdout=PIPE, stderr=PIPE, text=True) as process:
            assert "installing" in process.stdout.readline()
            while len(calls(fake)) < 3:
                assert process.poll() is None
            below = psutil.Process(process.pid).children(recursive=True)
            assert below and (*place.glob("*/environment"),)
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=30)[1] == "cdopt-tutorial: terminated\n"
        assert process.returncode == 128 + signal.SIGTERM
        wait_for_end(below)
        assert not [each for each in place.iterdir() if "cdopt" in each.name]


def calls(fake):
    """What the interpreter was asked for."""
    return (fake / "calls").read_text().splitlines()


class TestVersions:
    def test_are_combined_each_once(self, book, fake):
        python = str(fake / "python")
        found = matrix.combine(book, [python, python], ["2.11.0", "2.15.0"], [])
        assert [(each.python, each.torch, each.cdopt) for each in found] == [
            ("3.12.4", torch, "0.5") for torch in ("2.11.0", "2.15.0")
        ]

    def test_are_by_default_this_python_and_what_is_pinned(self, book):
        (found,) = matrix.combine(book, [], [], [])
        assert str(found) == f"Python {python_version()}, torch 2.0, cdopt 0.5"

    @pytest.mark.parametrize("version", ["2.13.0+cpu", "2.16.0rc1", "0.5.5.post1"])
    def test_may_have_all_parts(self, book, version):
        assert matrix.combine(book, [], [version], [])[0].torch == version

    @pytest.mark.parametrize("version", ["", ">=2.1", "2.13; rm", "-r x", "2.*"])
    def test_are_nothing_else(self, book, version):
        with pytest.raises(ValueError, match="but must be a version, such as"):
            matrix.combine(book, [], ["2.13.0", version], [])

    @pytest.mark.parametrize("version", ["3.10.2", "2.7.18", "", "else"])
    def test_of_python_are_those_the_package_takes(self, book, fake, version):
        write_fake(fake, version)
        with pytest.raises(ValueError, match="must be a Python here, 3.11 or newer"):
            matrix.combine(book, [str(fake / "python")], [], [])


def test_each_system_has_an_equality_test(project):
    systems = "reinforce parameter_server constrained_rnn hybrid shards ray".split()
    for name in [*systems, "sharded_training", "sharded_cdopt", "torchrun"]:
        text = (project.root / f"tests/test_{name}.py").read_text()
        assert re.search(rf"def test_\w*{matrix.EQUALITY}", text), name


@pytest.fixture(scope="module")
def tried():
    """What the book shows."""
    path = this_project().root / "book/versions.json"
    if not path.exists():
        pytest.skip("no run is kept: `cdopt-tutorial matrix --json book/versions.json`")
    return json.loads(path.read_text())


class TestBook:
    """The file that the page is made from, and what it stands on."""

    def test_has_the_pinned_torch_and_another(self, project, tried):
        (pinned,) = matrix.combine(project, [], [], [])
        torches = [x["torch"].partition("+")[0] for x in tried["environments"]]
        assert pinned.torch in torches and len(set(torches)) >= 2
        assert {x["cdopt"] for x in tried["environments"]} == {pinned.cdopt}

    def test_has_only_figures_of_the_reference(self, project, tried):
        known, reference = set(), Reference(project)
        for each in project.chapters():
            known |= reference.changes(each.stem, tried["profile"], {}).keys()
        changes = [c for each in tried["environments"] for c in each["changes"]]
        assert {change["figure"] for change in changes} <= known
