"""The public CI: as far as it can be checked without running it."""

import re

import pytest
import yaml

from cdopt_tutorial.publish.site import Site, read_site


@pytest.fixture(scope="module")
def jobs(project) -> dict:
    return workflow(project)["jobs"]


def workflow(project) -> dict:
    path = project.root / ".github" / "workflows" / "book.yml"
    return yaml.safe_load(path.read_text("utf-8"))


def steps(jobs: dict) -> list[dict]:
    return [step for job in jobs.values() for step in job["steps"]]


def test_it_runs_what_exists(project, jobs):
    makefile = (project.root / "Makefile").read_text("utf-8")
    targets = re.findall(r"^(\w+):", makefile, re.MULTILINE)
    runs = [step["run"] for step in steps(jobs) if "run" in step]
    assert runs
    for command in runs:
        program, *arguments = command.split()
        assert program in ("make", "bash"), command
        for each in arguments:
            known = each in targets if program == "make" else is_file(project, each)
            assert known, command


def is_file(project, name: str) -> bool:
    return (project.root / name).is_file()


def test_it_installs_by_what_exists(project, jobs):
    (setup,) = python_steps(jobs["book"])
    for name in setup["with"]["cache-dependency-path"].split():
        assert is_file(project, name)
    pyproject = (project.root / "pyproject.toml").read_text("utf-8")
    assert f'requires-python = ">={setup["with"]["python-version"]}"' in pyproject


def python_steps(job: dict) -> list[dict]:
    return [step for step in job["steps"] if "setup-python" in step.get("uses", "")]


def test_it_tries_newer_pythons_and_several_versions_of_torch(project, jobs):
    (setup,) = python_steps(jobs["versions"])
    assert setup["with"]["python-version"] == "${{ matrix.python }}"
    assert jobs["versions"]["strategy"]["matrix"] == {"python": ["3.12", "3.13"]}
    script = (project.root / ".ci" / "versions").read_text("utf-8")
    asked = set(re.findall(r"--torch (\S+)", script))
    pins = (project.root / "constraints.txt").read_text("utf-8")
    pyproject = (project.root / "pyproject.toml").read_text("utf-8")
    oldest = re.search(r'"torch>=(.+)"', pyproject)[1]
    assert len(asked) == 3 and f"{oldest}.0" in asked
    assert re.search(r"^torch==(.+)$", pins, re.MULTILINE)[1] in asked


def test_actions_are_pinned_by_their_major_version(jobs):
    for step in steps(jobs):
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]), step


def test_each_job_ends_and_may_write_only_what_it_must(project, jobs):
    assert workflow(project)["permissions"] == {"contents": "read"}
    writes = {
        (name, right)
        for name, job in jobs.items()
        for right, kind in job.get("permissions", {}).items()
        if kind == "write"
    }
    assert writes == {("publish", "pages"), ("publish", "id-token")}
    assert jobs["book"]["timeout-minutes"] == 90
    assert all(job["timeout-minutes"] <= 90 for job in jobs.values())


def test_only_the_branch_main_is_published(jobs):
    main = "github.ref == 'refs/heads/main'"
    assert jobs["publish"]["if"] == main
    assert jobs["publish"]["needs"] == "book"
    for step in jobs["book"]["steps"]:
        if re.search("pages", step.get("uses", "")) or step.get("run") == "make book":
            assert step["if"] == main, step


def test_it_sets_the_variables_that_the_pages_are_made_from(jobs, monkeypatch):
    (step,) = [step for step in jobs["book"]["steps"] if step.get("run") == "make book"]
    values = {
        "steps.pages.outputs.base_url": "https://an-owner.example/a-name",
        "github.server_url": "https://github.com",
        "github.repository": "an-owner/a-name",
        "github.ref_name": "main",
    }
    for name, value in step["env"].items():
        filled = re.sub(r"\$\{\{ (\S+) \}\}", lambda m: values[m[1]], value)
        monkeypatch.setenv(name, filled)
    assert read_site() == Site(
        "https://an-owner.example/a-name/", "https://github.com/an-owner/a-name"
    )


def test_any_browser_that_the_tests_know_spares_the_installation(project):
    script = (project.root / ".ci" / "run").read_text("utf-8")
    conftest = (project.root / "tests" / "conftest.py").read_text("utf-8")
    names = re.search(r"names = \((.*)\)", conftest)[1].replace('"', "").split(", ")
    assert len(names) == 3
    assert f'"$(command -v {" ".join(names)})"' in script
