"""The command `cdopt-tutorial hybrid`: good runs, bad input, and workers that die."""

import json
import math
import signal

import pytest
from running import fork_programs

from cdopt_tutorial.bench import hybrid as bench
from cdopt_tutorial.cli import main
from cdopt_tutorial.commands import hybrid as command
from cdopt_tutorial.hybrid import HybridConfig, Job, traffic


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

    @pytest.mark.parametrize(
        "args",
        [
            [],
            ["--manifold", "stiefel"],
            ["--manifold", "oblique", "--where", "server"],
        ],
        ids=["free", "stiefel", "oblique table"],
    )
    def test_against_local(self, hybrid, args, capsys):
        uneven = ["--shares", "3", "1", "--max-steps", "12"]
        results = hybrid("--against-local", *uneven, *args)
        difference = results["max_parameter_difference"]
        assert 0 <= difference <= 1e-10
        printed = capsys.readouterr().out
        assert f"from one process: {difference:.1e}" in printed
        if args:
            assert 0 < results["feasibility"] < 0.1
            assert f"feasibility {results['feasibility']:.1e}" in printed

    def test_that_diverges_is_a_failure_in_one_line(self, hybrid, capsys):
        # A weight that is not finite could not even be projected.
        written = hybrid("--smoke", "--lr", "1e6", "--manifold", "stiefel", code=1)
        assert not written
        error = capsys.readouterr().err
        assert "diverged" in error
        assert error.count("\n") == 1


@pytest.mark.usefixtures("no_process_starts")
class TestBadInput:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["--num-trainers", "0"], "num_trainers is 0, but must be at least 1"),
            (["--num-trainers", "two"], "invalid int value"),
            (["--num-trainers", "9999"], "9999"),  # too many for the data or the memory
            (
                ["--semantics", "hope"],
                "semantics is 'hope', but must be exact or original",
            ),
            (["--shares", "1"], "one above 0 for each of 2 trainers"),
            (["--shares", "1", "nan"], "one above 0 for each of 2 trainers"),
            (["--shares", "inf", "1"], "one above 0 for each of 2 trainers"),
            (["--shares", "9999", "1"], "each trainer needs at least 1"),
            (["--embedding", "0"], "embedding is 0"),
            (["--manifold", "sphere"], "manifold is 'sphere'"),
            (["--manifold", "stiefel", "--where", "server"], "oblique on the server"),
            (["--where", "here"], "where is 'here'"),
            (["--by", "hand"], "by is 'hand'"),
            (["--penalty", "0"], "penalty_param is 0.0"),
            (["--optimizer", "hope"], "optimizer is 'hope'"),
            (["--lr", "nan"], "lr is nan"),
            (["--lr", "inf"], "lr is inf"),
            (["--momentum", "1"], "momentum is 1.0"),
            (["--batch-size", "0"], "batch_size is 0"),
            (["--epochs", "0"], "epochs is 0"),
            (["--max-steps", "0"], "max_steps is 0"),
            (["--step-deadline", "0"], "step_deadline is 0.0"),
            (["--step-deadline", "inf"], "step_deadline is inf"),
            (["--seed", "-3"], "seed is -3"),
            (["--semantics", "original", "--against-local"], "no equal in one process"),
            (["--seed", "99999999999999999999"], "below 2**31"),
            (["--device", "abacus"], "must be auto, cpu, cuda or cuda:N"),
            (["--json", "/no/such/folder/out.json"], "can't write /no/such/folder"),
            (["--loud"], "unrecognized arguments: --loud"),
        ],
    )
    def test_is_one_line_and_exit_code_2(self, args, message, capsys):
        assert main(["hybrid", *args]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert message in printed.err


@pytest.mark.xdist_group("hybrid_command")
class TestDeath:
    @pytest.fixture
    def running(self, runs):
        """A run with two trainers under way."""
        runs.begin(["hybrid", "--epochs", "100000"], sign="Training")
        return runs

    @pytest.mark.parametrize("name", ["trainer0", "master", "ps"])
    def test_of_any_worker_is_named_and_ends_the_run(self, running, name):
        assert f"{name} was killed by SIGKILL" in running.kill_worker(name)

    def test_of_the_command_takes_the_workers_with_it(self, running):
        assert "Traceback" not in running.send_signal(signal.SIGINT, 130)


class TestBytes:
    def test_are_those_of_the_arithmetic_where_the_tensors_are_large(self):
        job = Job(HybridConfig(num_trainers=3, embedding=1024))
        measured = traffic.measured_bytes(job)
        # Beside the tensors some 19 kB of messages, at any width.
        assert 1 < measured / traffic.expected_bytes(job.config, job.data) < 1.03

    def test_are_those_of_the_tensors(self):
        config = HybridConfig(embedding=8, batch_size=10, dtype="float64")
        parts = traffic.expected_parts(config, Job(config).data)
        assert parts == {
            "tokens": 10 * 64 * 8,
            "offsets": 10 * 8,
            "vectors": 10 * 8 * 8,
            "gradients of vectors": 10 * 8 * 8,
            "gradients of the dense layer": 2 * (10 * 8 + 10) * 8,
            "replica difference": 2 * 2 * (10 * 8 + 10) * 8,
        }


def test_a_smoke_run_of_the_bench_has_all_figures_of_both_semantics(
    tmp_path, monkeypatch
):
    fork_programs(monkeypatch)
    file = tmp_path / "bench.json"
    assert main(["bench", "hybrid", "--smoke", "--json", str(file)]) == 0
    found = json.loads(file.read_text())["rows"]
    assert {row["name"] for row in found} == {
        "local: step",
        "local: samples",
        "bare: step",
        "bare: samples",
        "exact, 2 trainers, over bare: step",
        *(
            f"{semantics}, 2 trainers: {figure}"
            for semantics in ("exact", "original")
            for figure in bench.UNITS
        ),
    }
    assert all(row["value"] > 0 for row in found)


def test_the_bench_times_one_process_and_three_numbers_of_trainers():
    local, *others = bench.variants().values()
    assert [(each.config.semantics, each.config.num_trainers) for each in others] == [
        (semantics, number)
        for semantics in ("exact", "original")
        for number in (1, 2, 4)
    ]
    for job in (local, *others):  # all steps are of full joint batches
        assert len(job.data.train) == job.config.max_steps * job.config.batch_size
