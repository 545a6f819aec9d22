"""The command line: good runs, bad input, and workers that die."""

import json

import pytest

from cdopt_tutorial.cli import main


class TestReinforce:
    def test_a_smoke_run_writes_what_it_found(self, tmp_path, capsys):
        file = tmp_path / "out.json"
        args = "--conversation packed --num-observers 1 --log-interval 5 --seed 4"
        more = ["--smoke", "--json", str(file), *args.split()]
        assert main(["reinforce", *more]) == 0
        results = json.loads(file.read_text())
        assert results["episodes"] == len(results["rewards"]) == 40
        assert results["env_steps"] == sum(results["rewards"])
        assert results["solved"] is False
        assert results["seconds"] > 0
        assert 0 < results["running_reward"] < 500
        assert list(tmp_path.iterdir()) == [file]
        printed = capsys.readouterr()
        assert printed.err == ""
        log = [line for line in printed.out.splitlines() if line.startswith("Episode")]
        assert [line.split("\t")[0] for line in log] == [
            f"Episode {5 * i}" for i in range(1, 9)
        ]
        assert f"Average reward: {results['running_reward']:.2f}" in log[-1]


def test_bad_input_leaves_an_earlier_file_alone(tmp_path, no_process_starts):
    file = tmp_path / "out.json"
    file.write_text("earlier")
    assert main(["reinforce", "--gamma", "7", "--json", str(file)]) == 2
    assert file.read_text() == "earlier"


@pytest.mark.xdist_group("cli")
class TestDeath:
    # That of each worker, at many moments, is for `make lost`.
    @pytest.mark.parametrize(
        ("command", "sign", "name"),
        [
            ("reinforce --log-interval=1", "Episode", "observer0"),
            ("hybrid --epochs 100000", "Training", "ps"),
        ],
    )
    def test_of_a_worker_is_named_and_ends_the_run(self, runs, command, sign, name):
        runs.begin(command.split(), sign)
        assert f"{name} was killed by SIGKILL" in runs.kill_worker(name)
