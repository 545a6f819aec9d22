"""The command `cdopt-tutorial shard`: good runs, bad input, runs that diverge."""

import json
import math

import pytest
from clumsy import DIVERGED

from cdopt_tutorial.cli import main
from cdopt_tutorial.commands import shard as command
from cdopt_tutorial.sharding import MAX_VOCAB, ShardConfig, transformer

KEYS = {
    "losses", "valid_perplexity", "seconds_per_step", "bytes_per_step",
    "peak_memory_bytes", "feasibility", "max_parameter_difference",
}  # fmt: skip


@pytest.fixture
def shard(tmp_path):
    """Run the command; returns what it wrote."""

    def run(*args, code=0):
        file = tmp_path / "out.json"
        file.unlink(missing_ok=True)
        assert main(["shard", *args, "--device", "cpu", "--json", str(file)]) == code
        return json.loads(file.read_text()) if code == 0 else file.exists()

    return run


class TestRun:
    def test_a_smoke_run_writes_what_it_found(self, shard, capsys):
        found = shard("--smoke", "--against-local", "--strategy", "ddp")
        assert found.keys() == KEYS
        assert len(found["losses"]) == command.SMOKE["max_steps"]
        assert found["losses"][0] == pytest.approx(math.log(MAX_VOCAB), rel=0.1)
        assert found["losses"][-1] < found["losses"][0]
        assert 1 < found["valid_perplexity"] < MAX_VOCAB  # by chance it is at this
        assert 0 < found["seconds_per_step"] < 60
        config = ShardConfig(dtype="float64", device="cpu", **command.SMOKE)
        model = transformer(config, MAX_VOCAB)
        size = sum(each.nbytes for each in model.parameters())
        assert 2 * size <= found["bytes_per_step"] < 2.5 * size
        assert found["peak_memory_bytes"] > 4 * size
        assert 0 < found["feasibility"]["mapped"] < found["feasibility"]["weight"] < 1
        assert 0 <= found["max_parameter_difference"] <= 1e-10
        printed = capsys.readouterr()
        assert printed.err == ""
        gap, last = printed.out.splitlines()
        difference = found["max_parameter_difference"]
        assert gap == f"largest difference from one process: {difference:.1e}"
        assert f"validation perplexity {found['valid_perplexity']:.1f}; " in last
        assert f" {found['bytes_per_step']:,.0f} bytes, " in last
        assert last.endswith("(gloo: no GPU is used)")

    def test_of_free_stages_has_no_feasibility_and_no_difference(
        self, shard, monkeypatch
    ):
        for name in "measured_bytes", "measured_memory":
            monkeypatch.setattr(command.costs, name, lambda _: 1)
        found = shard("--smoke", "--strategy", "pipeline", "--manifold", "none")
        assert found.keys() == KEYS
        assert found["feasibility"] is found["max_parameter_difference"] is None
        assert all(map(math.isfinite, found["losses"]))

    @pytest.mark.parametrize(
        "args",
        [
            ["--lr", "1e6", "--manifold", "stiefel"],
            # Its losses are finite, but the perplexity is too large for a number.
            ["--lr", "100", "--manifold", "none"],
        ],
        ids=["not finite", "too large"],
    )
    def test_that_diverges_is_a_failure_in_one_line(self, shard, args, capsys):
        assert not shard("--smoke", "--num-ranks", "1", *args, code=1)
        error = capsys.readouterr().err
        assert error == f"cdopt-tutorial: {DIVERGED}\n"
