"""Roles for the tests of chapter 1; they must be importable by workers."""

from cdopt_tutorial.engines.torch_rpc import TorchRPC
from cdopt_tutorial.reinforce import run_agent


def train_each(configs):
    """The agent's: several trainings, one after another."""
    return [run_agent(TorchRPC(), config) for config in configs]
