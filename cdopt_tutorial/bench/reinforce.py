"""The four conversations side by side: speed, time to solve, calls and bytes."""

from dataclasses import replace
from functools import partial

from cdopt_tutorial.bench.rows import Measured, Progress, compare
from cdopt_tutorial.engines import Trace, Wire
from cdopt_tutorial.reinforce import CONVERSATIONS, ReinforceConfig, run

SEEDS = range(1, 6)
SMOKE_EPISODES = 4
TRACED_EPISODES = 32
BASELINE = "per-step"
UNITS = {"environment steps": "1/s", "time to solve": "s"}
UNITS |= {"calls": "1/step", "bytes": "B/step"}


def measure(progress: Progress, smoke: bool = False) -> Measured:
    """Train every conversation to the end, seed by seed; in a smoke run, not so far."""
    limit = SMOKE_EPISODES if smoke else ReinforceConfig.max_episodes
    each = {name: partial(figures, name, max_episodes=limit) for name in CONVERSATIONS}
    return compare(each, [1] if smoke else SEEDS, progress, UNITS, BASELINE)


def figures(conversation: str, seed: int, max_episodes: int) -> dict[str, float]:
    """What one run with two observers takes: by ``UNITS``, its episodes, if it solved.

    Calls and bytes are of a short run of its own, so that recording slows nothing.
    """
    limits = {"num_observers": 2, "max_episodes": max_episodes}
    config = ReinforceConfig(conversation, seed=seed, **limits)
    score = run(config, deadline=3600).score
    short = replace(config, max_episodes=min(max_episodes, TRACED_EPISODES))
    trace, wire = Trace(), Wire()
    steps = run(short, trace=trace, wire=wire, polling=False).score.env_steps
    return {
        "environment steps": score.env_steps / score.seconds,
        "time to solve": score.seconds,
        "episodes": len(score.rewards),
        "solved": float(score.solved),
        "calls": len(trace.calls) / steps,
        "bytes": wire.total / steps,
    }
