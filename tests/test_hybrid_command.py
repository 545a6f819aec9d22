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

    def test_that_diverges_is_a_failure_in_one_line(self, hybrid, capsys):
        # A weight that is not finite could not even be projected.
        written = hybrid("--smoke", "--lr", "1e6", "--manifold", "stiefel", code=1)
        assert not written
        error = capsys.readouterr().err
        assert "diverged" in error
        assert error.count("\n") == 1


@pytest.mark.usefixtures("no_process_starts")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--num-trainers 0", "num_trainers is 0, but must be at least 1"),
        ("--num-trainers two", "invalid int value"),
        ("--semantics hope", "semantics is 'hope', but must be exact or original"),
        ("--shares 1", "one above 0 for each of 2 trainers"),
        ("--shares 1 0", "one above 0 for each of 2 trainers"),
        ("--shares 1 nan", "one above 0 for each of 2 trainers"),
        ("--embedding 0", "embedding is 0"),
        ("--manifold sphere", "manifold is 'sphere'"),
        ("--manifold stiefel --where server", "oblique on the server"),
        ("--manifold oblique --where server --by cdopt", "dissolve on the server"),
        ("--by hand", "by is 'hand'"),
        ("--optimizer hope", "optimizer is 'hope'"),
        ("--momentum 1", "momentum is 1.0, but must be 0 to below 1"),
        ("--step-deadline 0", "step_deadline is 0.0"),
        ("--step-deadline inf", "step_deadline is inf"),
        ("--device abacus", "must be auto, cpu, cuda or cuda:N"),
        ("--loud", "unrecognized arguments: --loud"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(args, message, capsys):
    assert main(["hybrid", *args.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
