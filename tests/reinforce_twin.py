"""Chapter 1's training once more, in plain torch and gymnasium: nothing of the package.

What the package's runs share, over RPC or not, can't be seen by comparing them with
each other. It is seen by comparing them with this.
"""

import gymnasium
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


def train(config, environment, rounds):
    """Rewards of all episodes, environment steps, and the weights after training."""
    torch.manual_seed(config.seed)
    policy = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=config.lr)
    observers = range(config.num_observers)
    seeds = [[seed_of(config.seed, i, stream) for stream in (0, 1)] for i in observers]
    kind = environment, config.num_envs, "vector_entry_point"
    worlds = [gymnasium.make_vec(*kind) for _ in observers]
    streams = [torch.Generator().manual_seed(of_actions) for _, of_actions in seeds]
    totals, env_steps = [], 0
    for number in range(rounds):
        trails, returns = [], []
        for i in observers:
            start = None if number else seeds[i][0]
            trail, cut = play(policy, worlds[i], streams[i], start)
            totals += total_rewards(trail, len(cut))
            trails += trail
            returns += returns_of(trail, cut, config.gamma)
        env_steps += len(trails)
        optimizer.zero_grad()
        loss(policy, trails, torch.stack(returns)).backward()
        optimizer.step()
    return totals, env_steps, [weight.detach() for weight in policy.parameters()]


def seed_of(seed, observer, stream):
    return int(np.random.SeedSequence([seed, observer, stream]).generate_state(1)[0])


def play(policy, world, stream, start):
    """One episode each: steps (environment, state, action, reward), and who was cut."""
    states, _ = world.reset(seed=start)
    over, cut, trail = [False] * len(states), [False] * len(states), []
    while not all(over):
        with torch.no_grad():
            chances = torch.softmax(policy(torch.from_numpy(states)), dim=1)
        actions = torch.multinomial(chances, 1, generator=stream)[:, 0].numpy()
        later, rewards, fell, late, _ = world.step(actions)
        for env in range(len(states)):
            if not over[env]:
                trail.append((env, states[env], int(actions[env]), float(rewards[env])))
                over[env] = bool(fell[env] or late[env])
                cut[env] = bool(late[env] and not fell[env])
        states = later
    return trail, cut


def total_rewards(trail, num_envs):
    return [sum(r for e, _, _, r in trail if e == env) for env in range(num_envs)]


def returns_of(trail, cut, gamma):
    """Each step's return; an episode that was cut goes on as one begins on average."""
    _, starts = backwards(trail, torch.zeros(len(cut)), gamma)
    return backwards(trail, torch.tensor(cut) * sum(starts) / len(cut), gamma)[0]


def backwards(trail, following, gamma):
    following, returns = list(following), []
    for env, _, _, reward in reversed(trail):
        following[env] = torch.add(torch.tensor(reward), following[env], alpha=gamma)
        returns.append(following[env])
    return returns[::-1], following


def loss(policy, trails, returns):
    states = torch.tensor(np.array([state for _, state, _, _ in trails]))
    actions = torch.tensor([action for _, _, action, _ in trails])
    spread = returns.std(correction=0) + torch.finfo(returns.dtype).eps
    surprise = F.cross_entropy(policy(states), actions, reduction="none")
    return (surprise * ((returns - returns.mean()) / spread)).mean()
