"""The command line: good runs, bad input, and workers that die."""

import json
import signal

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


@pytest.mark.usefixtures("no_process_starts")
class TestBadInput:
    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ("reinforce --world-size 1", "world size is 1, but must be at least 2"),
            (
                "reinforce --gamma 1.2",
                "gamma is 1.2, but must be above 0 and at most 1",
            ),
            ("reinforce --gamma nan", "gamma is nan"),
            ("reinforce --conversation shouting", "must be one of per-step, packed"),
            ("reinforce --seed -3", "seed is -3"),
            ("reinforce --device abacus", "device is 'abacus', but must be auto, cpu"),
            ("reinforce --json /", "can't write /: it is a directory"),
            ("reinforce --loud", "unrecognized arguments: --loud"),
            ("", "arguments are required: COMMAND"),
            ("bench", "arguments are required: BENCH"),
            ("bench dance", "invalid choice: 'dance'"),
        ],
    )
    def test_is_one_line_and_exit_code_2(self, args, message, capsys):
        assert main(args.split()) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1
        assert message in printed.err

    def test_leaves_an_earlier_file_alone(self, tmp_path):
        file = tmp_path / "out.json"
        file.write_text("earlier")
        assert main(["reinforce", "--gamma", "7", "--json", str(file)]) == 2
        assert file.read_text() == "earlier"


@pytest.mark.xdist_group("cli")
class TestDeath:
    UNDER_WAY = {  # arguments, and what a run says as it trains
        "reinforce": ("--conversation=per-step --log-interval=1", "Episode"),
        "hybrid": ("--epochs 100000", "Training"),
    }

    def begin(self, runs, command):
        args, sign = self.UNDER_WAY[command]
        runs.begin([command, *args.split()], sign)

    @pytest.mark.parametrize(
        ("command", "name"),
        [
            ("reinforce", "agent"), ("reinforce", "observer0"), ("hybrid", "trainer0"),
            ("hybrid", "master"), ("hybrid", "ps"),
        ],
    )  # fmt: skip
    def test_of_any_worker_is_named_and_ends_the_run(self, runs, command, name):
        self.begin(runs, command)
        assert f"{name} was killed by SIGKILL" in runs.kill_worker(name)

    def test_of_the_command_takes_the_workers_with_it(self, runs):
        self.begin(runs, "reinforce")
        assert "Traceback" not in runs.send_signal(signal.SIGTERM, 143)
