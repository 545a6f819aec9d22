"""The settings, and the model: a small transformer, free or constrained."""

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

from cdopt_tutorial.calls.device import pick_device
from cdopt_tutorial.calls.steps import make_optimizer
from cdopt_tutorial.checks import at_least, check, choices
from cdopt_tutorial.constraints import MANIFOLDS, dissolve
from cdopt_tutorial.constraints.manifolds import Manifold, manifold_of
from cdopt_tutorial.constraints.rivals import RULES, Rival
from cdopt_tutorial.data import Corpus, Stream, load_corpus
from cdopt_tutorial.training import Training

MAX_VOCAB = 1_000
IN_PAIRS = "2d", "pipeline-ddp"
STAGED = "pipeline", "pipeline-ddp"
STRATEGIES = "ddp", "fsdp", "tp", "2d", *STAGED


@dataclass(frozen=True)
class ShardConfig(Training):
    """Settings of a run; ValueError if one is out of range, or the device missing."""

    #: how the model is spread over the ranks: "ddp", a copy on each; "fsdp", each
    #: parameter in shards, gathered for use; "tp", tensor parallel, each layer computed
    #: in parts; "2d", both, tensor parallel in pairs; "pipeline", some layers on each;
    #: or "pipeline-ddp", two stages, each replicated.
    strategy: str = "fsdp"
    num_ranks: int = 2  #: ranks, at least 1
    #: of constrained weights: "none", "stiefel", "oblique" or "sphere"
    manifold: str = "stiefel"
    #: which weights: "attention", the queries, keys and values of each head and the
    #: output projection; or "mlp", the two layers after them.
    where: str = "attention"
    penalty_param: float = 0.05  #: factor of ‖C(W)‖² in the loss, above 0
    num_layers: int = 2  #: blocks of attention and an MLP
    width: int = 64  #: of a token's vector, a multiple of num_heads
    num_heads: int = 4  #: heads of each attention
    seq_len: int = 32  #: tokens that a prediction can see
    batch_size: int = 16  #: sequences in a step, over all ranks
    #: "sgd", "adam", or "muon" for the blocks' matrices; or one that constrains weights
    #: without a map: "projected", "landing" or "spel". The other parameters are moved
    #: by Adam beside Muon, else by SGD.
    optimizer: str = "adam"
    lr: float = 3e-3  #: its learning rate, above 0
    momentum: float = 0.9  #: of all but Adam, 0 to below 1
    clip: float | None = None  #: largest norm of the whole gradient; None for any
    max_steps: int = 300  #: steps to train for
    seed: int = 1  #: of the parameters' start
    dtype: str = "float32"  #: "float32" or "float64"
    #: "auto", "cpu", "cuda" or "cuda:N"; the ranks share out the GPUs of "cuda".
    device: str = "auto"

    OPTIMIZERS = ("sgd", "adam", *RULES)

    def __post_init__(self):
        super().__post_init__()
        choices(self, strategy=STRATEGIES)
        choices(self, manifold=("none", *MANIFOLDS), where=("attention", "mlp"))
        at_least(self, 1, "num_ranks", "num_layers", "width", "num_heads", "seq_len")
        check(self, "clip", self.clip is None or self.clip > 0, "above 0")
        fits = self.width % self.num_heads == 0
        check(self, "width", fits, f"a multiple of num_heads, {self.num_heads}")
        fits = self.manifold == "stiefel" or not self.keeps
        free = f"sgd or adam or muon where the manifold is {self.manifold}"
        check(self, "optimizer", fits, free)
        self._check_parts()
        object.__setattr__(self, "device", pick_device(self.device))

    def _check_parts(self) -> None:
        """Refuse what does not divide among the ranks."""
        copies, parts = self.mesh
        if self.strategy in IN_PAIRS:
            fits = self.num_ranks >= 4 and self.num_ranks % 2 == 0
            allowed = f"4, 6, 8, ... where the strategy is {self.strategy}"
            check(self, "num_ranks", fits, allowed)
        if self.strategy in ("tp", "2d"):
            fits = self.num_heads % parts == 0
            check(self, "num_heads", fits, f"a multiple of {parts}: each has some")
        if self.strategy in STAGED:
            fits = self.num_layers >= parts
            check(self, "num_layers", fits, f"at least {parts}, one for each stage")
            copies *= parts  # a batch passes the stages in as many pieces
        fits = self.batch_size % copies == 0
        check(self, "batch_size", fits, f"a multiple of {copies}: each has a part")

    @property
    def keeps(self) -> bool:
        """Whether the optimizer enforces the constraint, without a map."""
        return self.optimizer not in ("sgd", "adam", "muon")

    @property
    def mesh(self) -> tuple[int, int]:
        """How many groups of ranks have their own data, and the ranks in each."""
        if self.strategy in IN_PAIRS:
            return self.num_ranks // 2, 2
        copies = self.num_ranks if self.strategy in ("ddp", "fsdp") else 1
        return copies, self.num_ranks // copies


@dataclass(frozen=True)
class Job:
    """A training; ValueError if a sequence is longer than the text allows."""

    config: ShardConfig  #: of the run
    #: the text, by default that of chapters 2 and 4.
    corpus: Corpus = field(default_factory=lambda: load_corpus(max_vocab=MAX_VOCAB))

    def __post_init__(self):
        config, columns = self.config, self.config.batch_size
        longest = self.stream().num_tokens // columns
        allowed = f"at most {longest} in this text, of {columns} columns"
        check(config, "seq_len", config.seq_len <= longest, allowed)

    def stream(self) -> Stream:
        """The training text, with a column for each sequence of a batch."""
        return Stream(self.corpus.train, self.config.seq_len, self.config.batch_size)


class Tokens(nn.Module):
    """Embeds tokens (batch, seq_len) as vectors (batch, seq_len, width)."""

    def __init__(self, vocab_size: int, seq_len: int, width: int):
        super().__init__()
        self.words = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(seq_len, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Each token's vector plus that of its position."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.words(tokens) + self.places(places)


class Attention(nn.Module):
    """Causal attention, by the heads that this rank has."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.head = width // num_heads
        projections = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.q, self.k, self.v, self.out = projections

    def forward(self, x: Tensor) -> Tensor:
        """What each token takes from itself and earlier ones, of the shape of x."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then an MLP four times as wide, each added to its input."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.before_mlp = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Vectors (batch, seq_len, width) to vectors of the same shape."""
        x = x + self.attention(self.before_attention(x))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


def transformer(config: ShardConfig, vocab_size: int) -> nn.Sequential:
    """The unconstrained model, the same on every rank by its seed.

    From tokens (batch, seq_len) to scores (batch, seq_len, vocab_size) of the next.
    """
    width, model = config.width, nn.Sequential()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model.tokens = Tokens(vocab_size, config.seq_len, width)
        for number in range(config.num_layers):
            model.add_module(f"block{number}", Block(width, config.num_heads))
        model.scores = nn.Sequential()
        model.scores.norm = nn.LayerNorm(width)
        model.scores.words = nn.Linear(width, vocab_size, bias=False)
    return model.to(config.torch_dtype)


def constrain(model: nn.Module, config: ShardConfig) -> None:
    """Put the chosen weights on their manifold, however they are sharded."""
    if config.manifold == "none":
        return
    on = config.manifold, config.penalty_param
    for layer, heads in chosen_layers(model, config).items():
        if config.keeps:
            start = manifold_of("stiefel", layer.weight, heads).nearest(layer.weight)
            layer.weight = nn.Parameter(start)
        else:  # blocks are for matrices: a row, or the whole weight, has norm 1 anyway
            dissolve(layer, "weight", *on, blocks=heads if on[0] == "stiefel" else 1)


def chosen_layers(model: nn.Module, config: ShardConfig) -> dict[nn.Linear, int]:
    """The layers whose weights are constrained, and the number of heads of each."""
    layers: dict[nn.Linear, int] = {}
    for part in model.modules():
        if isinstance(part, Block) and config.where == "mlp":
            layers |= {part.up: 1, part.down: 1}
        elif isinstance(part, Attention) and config.where == "attention":
            # Head by head, each with orthonormal rows.
            layers |= dict.fromkeys((part.q, part.k, part.v), config.num_heads)
            layers[part.out] = 1
    return layers


def kept(model: nn.Module, config: ShardConfig) -> dict[str, tuple[Tensor, Manifold]]:
    """The weights that the optimizer constrains, by name; once the model is spread."""
    if not config.keeps:
        return {}
    names, weights = {module: name for name, module in model.named_modules()}, {}
    for layer, heads in chosen_layers(model, config).items():
        on = manifold_of("stiefel", layer.weight, heads)
        weights[f"{names[layer]}.weight"] = layer.weight, on
    return weights


def optimizers(model: nn.Module, config: ShardConfig) -> list[optim.Optimizer]:
    """Those that move all of a model's parameters; on each rank, for its own part."""
    if config.optimizer not in RULES:
        return [make_optimizer(model.parameters(), config)]
    blocks, beside = {w: on.blocks for w, on in kept(model, config).values()}, "sgd"
    if config.optimizer == "muon":
        blocks, beside = dict.fromkeys(block_matrices(model), 1), "adam"
    groups = [{"params": [p], "blocks": number} for p, number in blocks.items()]
    rest = [p for p in model.parameters() if p not in blocks]
    rival = Rival(config.optimizer, groups, config.lr, config.momentum)
    return [make_optimizer(rest, replace(config, optimizer=beside)), rival]


def block_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The matrices of the blocks, which Muon moves."""
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    return [p for block in blocks for p in block.parameters() if p.ndim == 2]
