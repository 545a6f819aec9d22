"""The sweeps that disturb runs: what they do, and what they take for wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import need_hosts
from sweeps import lost, soak


@pytest.mark.engines
def test_a_smoke_run_finds_all_as_promised(tmp_path):
    need_hosts()
    rows = smoke_run("lost", tmp_path)
    kinds = {name.rpartition(":")[0] for name in rows}
    assert len(kinds) == 2 * len(lost.SMOKE)  # no loss each, a kill and a cut
    for kind in kinds:
        assert rows[f"{kind}: as promised"] == rows[f"{kind}: runs"] > 0
        assert rows[f"{kind}: processes left"] == 0


@pytest.mark.engines  # since it takes as long
def test_a_smoke_run_that_stops_launches_commands_and_kernels_leaves_nothing(tmp_path):
    rows = smoke_run("soak", tmp_path)
    for way in soak.WAYS:
        assert rows[f"{way}: not as promised"] == 0
        assert 50 < rows[f"{way}: memory in MB"] < 5000
        assert rows[f"{way}: processes below"] == 2  # fork server, resource tracker


def smoke_run(sweep: str, folder: Path) -> dict[str, float]:
    """The values of its rows, from a process of its own."""
    file = folder / "rows.json"
    command = [sys.executable, "-m", "sweeps", sweep, "--smoke", "--json", file]
    here = Path(__file__).parent
    subprocess.run(command, cwd=here, check=True)
    return {row["name"]: row["value"] for row in json.loads(file.read_text())["rows"]}
