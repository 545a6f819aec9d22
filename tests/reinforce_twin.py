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
    lengths, env_steps = [], 0
    for number in range(rounds):
        steps = []
        for i in observers:
            start = None if number else seeds[i][0]
            episodes, cut = play(policy, worlds[i], streams[i], start)
            lengths += map(len, episodes)  # each step earns 1
            steps += with_returns(episodes, cut, config.gamma)
        env_steps += len(steps)
        optimizer.zero_grad()
        loss(policy, *zip(*steps, strict=True)).backward()
        optimizer.step()
    return lengths, env_steps, [weight.detach() for weight in policy.parameters()]


def seed_of(seed, observer, stream):
    return int(np.random.SeedSequence([seed, observer, stream]).generate_state(1)[0])


def play(policy, world, stream, start):
    """One episode each: its steps (state, action), and who was cut off."""
    states, _ = world.reset(seed=start)
    episodes, cut = [[] for _ in states], [False] * len(states)
    running = set(range(len(states)))
    while running:
        with torch.no_grad():
            chances = torch.softmax(policy(torch.from_numpy(states)), dim=1)
        actions = torch.multinomial(chances, 1, generator=stream)[:, 0].numpy()
        later, _, fell, late, _ = world.step(actions)
        for env in list(running):
            episodes[env].append((states[env], int(actions[env])))
            cut[env] = bool(late[env] and not fell[env])
            if fell[env] or late[env]:
                running.remove(env)
        states = later
    return episodes, cut


def with_returns(episodes, cut, gamma):
    """All steps with their returns; after a cut, of an episode's start on average."""
    lengths = [len(episode) for episode in episodes]
    tail = sum(returns(length, 0.0, gamma)[0] for length in lengths) / len(lengths)
    for episode, late in zip(episodes, cut, strict=True):
        worth = returns(len(episode), tail * late, gamma)
        yield from ((*step, of) for step, of in zip(episode, worth, strict=True))


def returns(length, tail, gamma):
    """Of an episode's steps, which earn 1 each."""
    left = torch.arange(length, 0, -1)
    return (1 - gamma**left) / (1 - gamma) + gamma**left * tail


def loss(policy, states, actions, returns):
    worth = torch.stack(returns)
    spread = worth.std(correction=0) + torch.finfo(worth.dtype).eps
    scores = policy(torch.tensor(np.array(states)))
    surprise = F.cross_entropy(scores, torch.tensor(actions), reduction="none")
    return (surprise * ((worth - worth.mean()) / spread)).mean()
