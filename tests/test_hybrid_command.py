"""The command `cdopt-tutorial hybrid`: good runs, bad input, and workers that die."""

import json
import math

import pytest

from cdopt_tutorial.cli import main
from cdopt_tutorial.commands import hybrid as command


@pytest.fixture
def hybrid(tmp_path):
    """Run the command; returns what it wrote."""

    def run(*args, code=0):
        file = tmp_path / "out.json"
        file.unlink(missing_ok=True)
        assert main(["hybrid", *args, "--json", str(file)]) == code
        return json.loads(file.read_text()) if code == 0 else file.exists()

    return run


class TestRun:
    def test_a_smoke_run_writes_what_it_found(self, hybrid, capsys):
        results = hybrid("--smoke")
        assert results["num_trainers"] == 2 and results["semantics"] == "exact"
        assert results["steps"] == len(results["losses"]) == command.SMOKE["max_steps"]
        assert results["loss"] == results["losses"][-1] < results["losses"][0]
        assert results["losses"][0] == pytest.approx(math.log(10), rel=0.1)
        assert 0.5 < results["test_accuracy"] < 1  # of ten classes
        assert results["feasibility"] is None
        assert results["replica_difference"] == 0
        assert results["samples_per_second"] > 0
        assert results["max_parameter_difference"] is None
        printed = capsys.readouterr()
        assert printed.err == ""
        *epochs, last = printed.out.splitlines()
        assert [line.split("\t")[0] for line in epochs] == [
            "Training epoch 1",
            "Training epoch 2",
        ]
        assert f"test accuracy {results['test_accuracy']:.3f}" in last
        assert f"loss {results['loss']:.3f}" in last
        assert "feasibility" not in last
        assert f"{results['samples_per_second']:.0f} samples/s" in last
        assert last.endswith(results["transport"])

    def test_against_local(self, hybrid, capsys):
        args = "--against-local --shares 3 1 --max-steps 12 --manifold stiefel"
        results = hybrid(*args.split())
        difference = results["max_parameter_difference"]
        assert 0 <= difference <= 1e-10
        assert 0 < results["feasibility"] < 0.1
        printed = capsys.readouterr().out
        assert f"from one process: {difference:.1e}" in printed
        assert f"feasibility {results['feasibility']:.1e}" in printed
