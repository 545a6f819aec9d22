"""Chapter 1: an agent and its observers learn CartPole over RPC."""

from cdopt_tutorial.reinforce.agent import (
    CONVERSATIONS,
    Agent,
    Observer,
    ReinforceConfig,
)
from cdopt_tutorial.reinforce.learner import Episodes, Policy, discounted_returns
from cdopt_tutorial.reinforce.system import Round, Score, run, run_agent, run_locally
