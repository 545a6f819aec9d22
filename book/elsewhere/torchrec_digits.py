"""Chapter 5's digits by TorchRec, on two processes: run `python torchrec_digits.py`."""
import copy
import os
import tempfile
import torch
import torchrec
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as step_in_backward
from torchrec.distributed import DistributedModelParallel, sharding_plan, types

PIXELS, LEVELS, WIDTH, RANKS, BATCH_SIZE, EPOCHS, LR = 64, 17, 16, 2, 60, 20, 0.1

def read_bags():  # a digit's label, then a token for each pixel: 17 * pixel + level
    images, labels = map(torch.from_numpy, load_digits(return_X_y=True))
    rows = torch.column_stack([labels, images.long() + LEVELS * torch.arange(PIXELS)])
    torch.manual_seed(0)  # all ranks shuffle alike, and their layers begin alike
    return rows[torch.randperm(len(rows))].split([357, 1440])  # tested on, and trained

class Bags(nn.Module):  # in place of nn.EmbeddingBag, with a table that can be cut
    def __init__(self):
        super().__init__()
        own = {"name": "table", "feature_names": ["pixels"], "init_fn": nn.init.zeros_}
        tables = [torchrec.EmbeddingBagConfig(LEVELS * PIXELS, WIDTH, **own)]
        self.tables = torchrec.EmbeddingBagCollection(tables)

    def forward(self, tokens):
        bags = ["pixels"], tokens.flatten(), None, torch.full(tokens.shape[:1], PIXELS)
        return self.tables(torchrec.KeyedJaggedTensor(*bags)).values()

def share(model):  # half of the table's rows on each rank; the layer on both, by DDP
    step_in_backward(torch.optim.SGD, model[0].parameters(), {"lr": LR})
    cut = {"table": sharding_plan.row_wise()}  # or table_wise(rank=0), as on a server
    plan = sharding_plan.construct_module_sharding_plan(model[0].tables, cut)
    return DistributedModelParallel(model, plan=types.ShardingPlan({"0.tables": plan}))

def learn(model, parameters, batches):
    optimizer = torch.optim.SGD(parameters, LR)
    for batch in batches * EPOCHS:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[:, 1:]), batch[:, 0]).backward()
        optimizer.step()

def train(rank, file):
    torch.distributed.init_process_group("gloo", file, rank=rank, world_size=RANKS)
    (tested, trained), zeros = read_bags(), torch.zeros(LEVELS * PIXELS, WIDTH)
    table = nn.EmbeddingBag.from_pretrained(zeros, freeze=False, mode="sum")
    alone = nn.Sequential(table, nn.Linear(WIDTH, 10))
    model = share(nn.Sequential(Bags(), dense := copy.deepcopy(alone[1])))
    learn(alone, alone.parameters(), trained.split(BATCH_SIZE))
    learn(model, dense.parameters(), trained[rank::RANKS].split(BATCH_SIZE // RANKS))
    scores = model(tested[:, 1:])  # both ask, since each has a part of the table
    if rank == 0:
        print(f"test accuracy: {(scores.argmax(1) == tested[:, 0]).float().mean():.3f}")
        print(f"off one process: {(scores - alone(tested[:, 1:])).abs().max():.1e}")

if __name__ == "__main__":
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")  # loopback only
    with tempfile.TemporaryDirectory() as folder:  # where the processes find each other
        torch.multiprocessing.spawn(train, [f"file://{folder}/gloo"], RANKS)
