"""Chapter 1: an agent and its observers learn CartPole over RPC."""

from cdopt_tutorial.reinforce.agent import Agent
from cdopt_tutorial.reinforce.config import ReinforceConfig
from cdopt_tutorial.reinforce.conversations import CONVERSATIONS
from cdopt_tutorial.reinforce.learner import Actor, Episodes, Policy, discounted_returns
from cdopt_tutorial.reinforce.observer import Observer
from cdopt_tutorial.reinforce.training import (
    Round,
    Score,
    Training,
    run,
    run_agent,
    run_locally,
)

__all__ = [
    "CONVERSATIONS",
    "Actor",
    "Agent",
    "Episodes",
    "Observer",
    "Policy",
    "ReinforceConfig",
    "Round",
    "Score",
    "Training",
    "discounted_returns",
    "run",
    "run_agent",
    "run_locally",
]
