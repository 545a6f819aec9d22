"""What the bare programs do on workers, and the package in one process.

The programs themselves are modules that the tests write where workers find them. Roles
that train return parameters by their names, in a list; what stands alone returns those
at its start and at its end.
"""

import importlib
import math

import torch
import torch.distributed.rpc as rpc
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy

from cdopt_tutorial import hybrid
from cdopt_tutorial import parameter_server as rnn
from cdopt_tutorial.constraints import Constraints, dissolve
from cdopt_tutorial.data import Corpus, Vocabulary
from cdopt_tutorial.data.bags import Bags, BagSplit
from cdopt_tutorial.run import Role, serve

ALL_REDUCE = torch.ops.c10d_functional.all_reduce


def program(name):
    """The program, and where its ranks can meet."""
    module = importlib.import_module(f"bare_{name}")
    return module, f"file://{module.__file__}.ranks"


@torch.no_grad()
def begin(module):
    """Set initial numbers by shapes alone, because threads of a server race to draw."""
    for parameter in module.parameters():
        generator = torch.Generator().manual_seed(math.prod(parameter.shape))
        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def attach():
    """Set up a worker as the program does, but in float64 and with known weights."""
    torch.jit._state.disable()
    torch.set_default_dtype(torch.float64)
    for kind in (nn.Embedding, nn.Linear, nn.LSTM):
        kind.reset_parameters = begin


def weights(module):
    return {name: part.detach().clone() for name, part in module.named_parameters()}


def named(names, modules):
    of = zip(names, map(weights, modules), strict=True)
    return {f"{name}.{part}": value for name, w in of for part, value in w.items()}


RNN = "embedding.encoder", "rnn", "decoder.decoder"


def train_rnn(_):
    bare, _ = program("rnn")
    return [named(RNN, bare.train(bare.read_tokens()))]


def rnn_alone():
    bare, _ = program("rnn")
    vocab, width = bare.VOCAB_SIZE, bare.WIDTH
    layers = nn.Embedding(vocab, width), nn.LSTM(width, width), nn.Linear(width, vocab)
    start, tokens = named(RNN, layers), bare.read_tokens()
    config = rnn.RNNConfig(
        embedding=width, hidden=width, dropout=0.0, seq_len=bare.SEQ_LEN, lr=bare.LR,
        batch_size=bare.BATCH_SIZE, clip=None, max_steps=10, dtype="float64",
    )  # fmt: skip
    words = tuple(f"word{number}" for number in range(vocab))
    corpus = Corpus(Vocabulary(words), tokens, tokens)
    return start, rnn.run_locally(rnn.Job(config, corpus, begin=start)).weights


HYBRID = "table", "dense"


def drive_hybrid(_):
    bare, path = program("hybrid")
    args = (torch.zeros(bare.TOKENS, bare.WIDTH), False), {"mode": "sum"}
    table = rpc.remote("ps", nn.EmbeddingBag.from_pretrained, *args)
    calls = [rpc.rpc_async(i, bare.train, (i, table, path), timeout=0) for i in (0, 1)]
    layers = [call.wait() for call in calls]
    return [named(HYBRID, (table.to_here(), dense)) for dense in layers]


def hybrid_alone():
    bare, _ = program("hybrid")
    table = nn.EmbeddingBag(bare.TOKENS, bare.WIDTH)
    start = named(HYBRID, (table, nn.Linear(bare.WIDTH, 8)))
    start["table.weight"].zero_()
    config = hybrid.HybridConfig(
        embedding=bare.WIDTH, lr=bare.LR, momentum=0.0, epochs=1,
        batch_size=bare.BATCH_SIZE, dtype="float64", device="cpu",
    )  # fmt: skip
    # The package shuffles; in this order its joint batches are the program's.
    rows = bare.read_bags()[: bare.TRAINED]
    generator = torch.Generator().manual_seed(1000 * config.seed)
    rows = rows[torch.randperm(len(rows), generator=generator).argsort()]
    bags = Bags(rows[:, 1:], rows[:, 0])
    few = bags.select(torch.arange(8))
    data = BagSplit(bags, few, few, num_tokens=bare.TOKENS, num_classes=8)
    return start, hybrid.run_locally(hybrid.Job(config, data, start)).weights


def train_servers(rank):
    bare, _ = program("servers")
    bare.train(rank)
    parts = [rpc.rpc_sync(server, own_rows) for server in bare.SERVERS]
    return [{"table": torch.stack(parts, 1).flatten(0, 1)}]


def own_rows():
    return program("servers")[0].weight.detach()


def servers_alone():
    bare, _ = program("servers")
    table = torch.zeros(bare.TOKENS, 8, requires_grad=True)
    start = {"table": table.detach().clone()}
    adam = torch.optim.Adam([table], bare.LR)
    for rows in bare.read_bags()[: bare.TRAINED].split(bare.BATCH_SIZE) * bare.EPOCHS:
        loss = cross_entropy(table[rows[:, 1:]].sum(1), rows[:, 0])
        table.grad, *_ = torch.autograd.grad(loss, table)
        adam.step()
    return start, {"table": table.detach()}


SHARDS = "vectors", "up", "down"


def train_shards(rank):
    bare, path = program("shards")
    with CommDebugMode() as counted:
        ended = bare.train(rank, path)
    # In a step: for the constraint and the scores; for the constraint's gradient
    # with respect to both factors; and for that of the vectors, within Adam.
    assert counted.get_comm_counts()[ALL_REDUCE] == (2 + 2 + 1) * bare.STEPS
    return [dict(zip(SHARDS, ended, strict=True))]


def shards_alone():
    bare, _ = program("shards")
    text = bare.read_text()
    start = bare.starts(int(text.max()) + 1)  # the random stream goes on from here
    vectors, *weights = (nn.Parameter(value.clone()) for value in start)
    up, down = layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in weights)
    up.weight, down.weight = weights
    dissolve(up, penalty_param=bare.PENALTY_PARAM)

    def loss():
        at = torch.randint(len(text) - bare.CONTEXT, (bare.BATCH, 1))
        window = text[at + torch.arange(bare.CONTEXT + 1)]
        hidden = torch.tanh(up(vectors[window[:, :-1]].flatten(1)))
        return cross_entropy(down(hidden), window[:, -1])

    parameters = [vectors, *layers.parameters()]
    descend(loss, torch.optim.Adam(parameters, bare.LR), layers, bare.STEPS)
    ended = (parameter.detach() for parameter in parameters)
    return tuple(dict(zip(SHARDS, each, strict=True)) for each in (start, ended))


def train_fsdp(rank):
    bare, path = program("fsdp")
    return [bare.train(rank, path)]


def fsdp_alone():
    bare, _ = program("fsdp")
    torch.manual_seed(0)
    model = bare.Transformer()
    for block in model.blocks.layers:
        nn.init.orthogonal_(block.linear1.weight)
        dissolve(block.linear1, penalty_param=bare.PENALTY_PARAM)
    start = weights(model)
    free = dict(model.named_parameters())
    tall = [free.pop(name) for name in [*free] if name.endswith("original")]
    groups = {"params": tall, "weight_decay": 0.0}, {"params": free.values()}
    text = torch.tensor(list(open(nn.functional.__file__, "rb").read()))
    draws = [torch.Generator().manual_seed(rank) for rank in range(bare.RANKS)]
    most, size = len(text) - bare.CONTEXT, (bare.BATCH, 1)

    def loss():  # of the joint batch
        begins = torch.cat([torch.randint(most, size, generator=g) for g in draws])
        at = begins + torch.arange(bare.CONTEXT)
        return cross_entropy(model(text[at]), text[at + 1].flatten())

    descend(loss, torch.optim.AdamW(groups, bare.LR), model, bare.STEPS)
    Constraints(model).project_()
    return start, weights(model)


def descend(loss, optimizer, model, steps):
    constraints = Constraints(model)
    for _ in range(steps):
        (loss() + constraints.penalty()).backward()
        optimizer.step()
        optimizer.zero_grad()


SYSTEMS = {
    "rnn": (train_rnn, ["trainer"], ["ps"], rnn_alone),
    "hybrid": (drive_hybrid, ["master"], ["trainer0", "trainer1", "ps"], hybrid_alone),
    "servers": (train_servers, ["trainer0", "trainer1"], ["ps0", "ps1"], servers_alone),
    "shards": (train_shards, ["rank0", "rank1"], [], shards_alone),
    "fsdp": (train_fsdp, ["rank0", "rank1"], [], fsdp_alone),
}


def roles(name):
    """The roles of a system's workers, and of one that has the package do the same."""
    train, trainers, serving, alone = SYSTEMS[name]
    played = dict.fromkeys(serving, Role(serve))  # the first two are hybrid's trainers
    played |= {who: Role(train, (rank,)) for rank, who in enumerate(trainers)}
    return played | {"alone": Role(alone)}
