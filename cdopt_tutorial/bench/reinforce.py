"""The four conversations: speed, time to solve, calls, bytes."""

from dataclasses import replace
from functools import partial

from cdopt_tutorial.bench.rows import Measured, Progress, sweep
from cdopt_tutorial.engines import Trace, Wire
from cdopt_tutorial.reinforce import CONVERSATIONS, ReinforceConfig, run

SEEDS = 5  # 1 to 5, one of each turn
TRACED_EPISODES = 32
BASELINE = "per-step"
UNITS = {"environment steps": "1/s", "time to solve": "s"}
UNITS |= {"calls": "1/step", "bytes": "B/step"}


def measure(progress: Progress, smoke: bool = False, device: str = "cpu") -> Measured:
    """Train each conversation to the end, seed by seed; in a smoke run, not so far."""
    limit = 4 if smoke else ReinforceConfig.max_episodes
    options = {"max_episodes": limit, "device": device}
    variants = {name: partial(figures, name, **options) for name in CONVERSATIONS}
    return sweep(variants, 1 if smoke else SEEDS, progress, UNITS, BASELINE)


def figures(
    conversation: str, seed: int, max_episodes: int, device: str = "cpu"
) -> dict[str, float]:
    """What one run with two observers takes: by ``UNITS``, its episodes, if it solved.

    Calls and bytes are of a short run of its own, so that recording slows nothing.
    """
    options = {"num_observers": 2, "max_episodes": max_episodes, "device": device}
    config = ReinforceConfig(conversation, seed=seed, **options)
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
