"""The four conversations side by side: speed, time to solve, calls and bytes."""

from collections.abc import Callable
from functools import partial

from cdopt_tutorial.bench.rows import Row, compare
from cdopt_tutorial.engines import Trace, Wire
from cdopt_tutorial.reinforce import CONVERSATIONS, ReinforceConfig, run

NUM_OBSERVERS = 2
SEEDS = range(1, 6)
SMOKE_EPISODES = 4
TRACED_EPISODES = 32
BASELINE = "per-step"
UNITS = {
    "environment steps": "1/s",
    "time to solve": "s",
    "calls": "1/step",
    "bytes": "B/step",
}


def measure(
    progress: Callable[[str], None], smoke: bool = False
) -> tuple[list[Row], dict]:
    """Train every conversation to the end, seed by seed; in a smoke run, not so far."""
    limit = SMOKE_EPISODES if smoke else ReinforceConfig.max_episodes
    variants = {
        name: partial(figures, name, max_episodes=limit) for name in CONVERSATIONS
    }
    return compare(variants, [1] if smoke else SEEDS, progress, UNITS, BASELINE)


def figures(conversation: str, seed: int, max_episodes: int) -> dict[str, float]:
    """What one run of a conversation takes; also called by chapter 1.

    Returns:
        Environment steps a second, seconds, episodes, 1.0 if it solved the task,
        and what :func:`traffic` gives.
    """
    config = ReinforceConfig(
        conversation, NUM_OBSERVERS, seed=seed, max_episodes=max_episodes
    )
    score = run(config, deadline=3600).score
    return {
        "environment steps": score.env_steps / score.seconds,
        "time to solve": score.seconds,
        "episodes": len(score.rewards),
        "solved": float(score.solved),
        **traffic(conversation, seed, min(max_episodes, TRACED_EPISODES)),
    }


def traffic(
    conversation: str, seed: int, max_episodes: int = TRACED_EPISODES
) -> dict[str, float]:
    """Calls and bytes an environment step, both ways, from a short traced run.

    A run of its own, so that recording does not slow down what is timed. The bytes are
    those of the workers' sockets, with all that the start and the end send.
    """
    config = ReinforceConfig(
        conversation, NUM_OBSERVERS, seed=seed, max_episodes=max_episodes
    )
    trace, wire = Trace(), Wire()
    steps = run(config, trace=trace, wire=wire, polling=False).score.env_steps
    return {"calls": len(trace.calls) / steps, "bytes": wire.total / steps}
