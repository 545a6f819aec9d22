"""The systems on Monarch, where it is installed: as in one process, or named."""

import psutil
import pytest
import ray_roles
import roles
from reinforce_roles import train_each

from cdopt_tutorial import data, hybrid, sharding
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.engines import Role, WorkerError, serve
from cdopt_tutorial.engines.on_monarch import OnMonarch, claim
from cdopt_tutorial.equality import max_difference
from cdopt_tutorial.hybrid import HybridConfig
from cdopt_tutorial.parameter_server import RNNConfig
from cdopt_tutorial.reinforce import CONVERSATIONS, ReinforceConfig, run, run_locally
from cdopt_tutorial.sharding import ShardConfig

pytestmark = pytest.mark.engines

FEW = {"manifold": "stiefel", "max_steps": 5, "dtype": "float64"}
NARROW = {"embedding": 16, "hidden": 16, "dropout": 0.0, "where": "server"}
SYSTEMS = [
    (rnn, RNNConfig(num_trainers=2, **FEW | NARROW)),
    (hybrid, HybridConfig(**FEW)),
    (sharding, ShardConfig("tp", width=16, seq_len=8, **FEW)),
]


def test_its_log_is_where_nobody_else_writes(tmp_path):
    folder = tmp_path / "user"
    for _ in range(2):
        claim(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
        folder.chmod(0o777)
    link = tmp_path / "link"
    link.symlink_to(folder)
    refused = "^monarch would keep its log in .*/link, which is not this user's folder$"
    with pytest.raises(WorkerError, match=refused):
        claim(link)
    assert folder.stat().st_mode & 0o777 == 0o777


@pytest.fixture
def installed():
    pytest.importorskip("monarch", reason="Monarch is beta, and not installed here")


@pytest.mark.usefixtures("installed")
class TestSystems:
    def test_every_conversation_has_the_rewards_of_one_process(self):
        few = {"num_envs": 2, "max_episodes": 8}
        configs = [ReinforceConfig(c, **few) for c in CONVERSATIONS]
        roles = {"agent": Role(train_each, (OnMonarch(), configs))}
        roles |= {f"observer{i}": Role(serve) for i in range(2)}
        found = [each.score.rewards for each in OnMonarch().launch(roles)["agent"]]
        assert found == [run_locally(config).score.rewards for config in configs]

    @pytest.mark.parametrize("system, config", SYSTEMS)
    def test_a_training_has_the_parameters_of_one_process(self, system, config):
        corpus = [data.Grammar(seed=1).corpus(20_000, 5_000)] * (system is rnn)
        job = system.Job(config, *corpus)
        found, local = system.run(job, OnMonarch()), system.run_locally(job)
        (found, *_) = found if system is rnn else [found]  # of each trainer
        assert max_difference(found.weights, local.weights) <= 1e-10

    def test_what_workers_print_and_report_comes_to_the_caller(self, capsys):
        records = []
        speakers = {
            "agent": Role(roles.speak),
            "half": Role(print, ("a line",), {"end": ""}),
            "other": Role(roles.report_all, (list(range(50)),)),
        }
        OnMonarch().launch(speakers, on_report=lambda *record: records.append(record))
        printed = capsys.readouterr().out
        assert "[agent] to be heard\n" in printed
        assert "[half] a line\n" in printed
        assert records == [("other", number) for number in range(50)]

    def test_a_worker_that_dies_is_named(self):
        with pytest.raises(WorkerError, match="^agent died"):
            run(ReinforceConfig(num_envs=2), OnMonarch(), attach=ray_roles.lose_agent)

    @pytest.mark.parametrize(
        "role, reason",
        [
            (Role(divmod, (1, 0)), "raised ZeroDivisionError"),
            (Role(roles.Unreadable), "returned what can't be unpickl"),
        ],
    )
    def test_what_a_worker_raises_or_nobody_can_read_is_named(self, role, reason):
        with pytest.raises(WorkerError, match=f"^agent {reason}"):
            OnMonarch().launch({"agent": role, "other": Role(serve)})

    def test_one_that_is_stopped_is_named_and_nothing_is_left(self):
        own, stopped = psutil.Process(), Role(roles.send_self, ("SIGSTOP",))
        before = own.children(recursive=True)
        with pytest.raises(WorkerError, match="^other has not been heard from"):
            OnMonarch().launch({"agent": Role(serve), "other": stopped})
        left = [each for each in own.children(recursive=True) if each not in before]
        # The fork server and its tracker stay for the next run.
        assert [e for e in left if "multiprocessing" not in " ".join(e.cmdline())] == []
