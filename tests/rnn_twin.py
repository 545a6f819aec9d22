"""The language model and its training in plain torch, to compare the package with."""

import torch
from torch import nn
from torch.nn import functional as F


class Twin(nn.Module):
    """All parts in one module, by the package's names."""

    def __init__(self, vocab_size, config):
        super().__init__()
        table = nn.Embedding(vocab_size, config.embedding)
        self.embedding = nn.ModuleDict({"encoder": table})
        self.rnn = nn.LSTM(config.embedding, config.hidden)
        self.decoder = nn.ModuleDict({"decoder": nn.Linear(config.hidden, vocab_size)})
        self.dropout = config.dropout
        self.double()

    def forward(self, tokens, hidden=None):
        vectors = self.embedding["encoder"](tokens)
        output, hidden = self.rnn(self.drop(vectors), hidden)
        return self.decoder["decoder"](self.drop(output)), hidden

    def drop(self, values):
        return F.dropout(values, self.dropout, self.training)


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
