"""Chapter 1's CartPole by TorchRL's collectors: run `python torchrl_cartpole.py`."""
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv
from torchrl.modules import ProbabilisticActor
from torchrl.objectives.value.functional import reward2go

OBSERVERS, EPISODES, GOAL, GAMMA, LR = 2, 10, 150, 0.99, 0.01
STEPS = 100  # of each observer, before it sends them

def make_env():  # runs in each observer's process
    return GymEnv("CartPole-v1", categorical_action_encoding=True)

def make_policy():
    network = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 2))
    scores = TensorDictModule(network, ["observation"], ["logits"])
    drawn = {"distribution_class": torch.distributions.Categorical}
    return ProbabilisticActor(scores, ["logits"], **drawn)

def make_collector(policy):  # starts the observers; each has a copy of the policy
    steps = {"frames_per_batch": OBSERVERS * STEPS, "total_frames": -1}  # without end
    whole = {"trajs_per_batch": EPISODES, "traj_format": "cat"}  # end to end
    ways = {"num_collectors": OBSERVERS, "sync": True}  # all wait for the slowest
    joined = {"cat_results": 0, "use_buffers": True}  # batches come in shared memory
    return Collector(make_env, policy, **steps, **whole, **ways, **joined)

def learn(policy, optimizer, batch):  # from whole episodes, as in chapter 1
    rewards, ends = batch["next", "reward"], batch["next", "done"]
    returns = reward2go(rewards, ends, GAMMA)[:, 0]
    advantages = (returns - returns.mean()) / returns.std(correction=0)
    losses = -policy.get_dist(batch).log_prob(batch["action"])
    optimizer.zero_grad()
    (losses * advantages).mean().backward()
    optimizer.step()
    return torch.diff(ends[:, 0].nonzero()[:, 0], prepend=torch.tensor([-1]))

def train():
    torch.manual_seed(0)
    policy, running_reward, rounds = make_policy(), 0.0, 0
    optimizer = torch.optim.Adam(policy.parameters(), lr=LR)
    collector = make_collector(policy)
    collector.set_seed(0)
    for batch in collector:
        for length in learn(policy, optimizer, batch).tolist():  # 1 for each step
            running_reward += 0.05 * (length - running_reward)
        collector.update_policy_weights_()  # the observers' copies
        rounds += 1
        if rounds % 5 == 0 or running_reward >= GOAL:
            print(f"running reward {running_reward:6.2f}", flush=True)
        if running_reward >= GOAL:
            break
    collector.shutdown()

if __name__ == "__main__":
    train()
