"""The language model and its training in plain torch, to compare the package with."""

import torch
from torch import nn
from torch.nn import functional as F


class Twin(nn.Module):
    """All parts in one module."""

    def __init__(self, vocab_size, config):
        super().__init__()
        self.table = nn.Embedding(vocab_size, config.embedding)
        between = config.dropout if config.num_layers > 1 else 0.0
        sizes = config.embedding, config.hidden, config.num_layers
        self.lstm = nn.LSTM(*sizes, dropout=between)
        self.out = nn.Linear(config.hidden, vocab_size)
        self.dropout = config.dropout
        self.double()

    def forward(self, tokens, hidden=None):
        vectors = F.dropout(self.table(tokens), self.dropout, self.training)
        output, hidden = self.lstm(vectors, hidden)
        return self.out(F.dropout(output, self.dropout, self.training)), hidden

    def named(self):
        """The parameters by the package's names."""
        parts = {"table": "embedding.encoder", "lstm": "rnn", "out": "decoder.decoder"}
        return {
            f"{parts[part]}.{name}": parameter.detach().clone()
            for part, module in self.named_children()
            for name, parameter in module.named_parameters()
        }


def columns_of(tokens, number):
    """The text as columns (rows + 1, number); the last row has targets only."""
    rows = (len(tokens) - 1) // number
    return torch.stack(
        [tokens[c * rows : (c + 1) * rows + 1] for c in range(number)], 1
    )


def train(model, corpus, config, stream=0):
    """Losses of all steps, and of the validation part after each epoch.

    All dropout is drawn from the random stream of the worker with the given number.
    """
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam(model.parameters())
    else:
        optimizer = torch.optim.SGD(model.parameters(), momentum=config.momentum)
    text = columns_of(corpus.train, config.batch_size)
    losses, valid = [], []
    for epoch in range(config.epochs):
        optimizer.param_groups[0]["lr"] = config.lr * config.lr_decay**epoch
        hidden = None
        for number, inputs in enumerate(text[:-1].split(config.seq_len)):
            if number % config.save_every == 0:
                torch.manual_seed(1000 * config.seed + 10 * len(losses) + stream)
            begin = number * config.seq_len + 1
            targets = text[begin : begin + len(inputs)]
            scores, hidden = model(inputs, hidden)
            loss = F.cross_entropy(scores.transpose(1, 2), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            hidden = tuple(state.detach() for state in hidden)
            losses.append(loss.item())
        valid.append(evaluate(model, columns_of(corpus.valid, config.batch_size)))
        model.train()
    return losses, valid


@torch.no_grad()
def evaluate(model, text):
    """Mean loss of whole columns, without windows."""
    model.eval()
    scores, _ = model(text[:-1])
    return F.cross_entropy(scores.transpose(1, 2), text[1:]).item()
