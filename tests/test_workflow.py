"""The public CI: as far as it can be checked without running it."""

import re

import pytest
import yaml

from cdopt_tutorial.publish.site import Site, read_site


@pytest.fixture(scope="module")
def workflow(project) -> dict:
    path = project.root / ".github" / "workflows" / "book.yml"
    return yaml.safe_load(path.read_text("utf-8"))


def test_it_runs_what_exists(project, workflow):
    makefile = (project.root / "Makefile").read_text("utf-8")
    targets = re.findall(r"^(\w+):", makefile, re.MULTILINE)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    runs = [step["run"].split() for step in steps if "run" in step]
    assert {program for program, *_ in runs} == {"make", "bash"}
    for each in (each for _, *arguments in runs for each in arguments):
        assert each in targets or (project.root / each).is_file(), each


def test_it_sets_the_variables_that_the_pages_are_made_from(workflow, monkeypatch):
    steps = workflow["jobs"]["book"]["steps"]
    (step,) = [step for step in steps if step.get("run") == "make book"]
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
