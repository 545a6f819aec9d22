"""The bytes that a step sends, by arithmetic and as the sockets count them."""

from dataclasses import replace

from cdopt_tutorial import training
from cdopt_tutorial.data import Stream
from cdopt_tutorial.parameter_server.model import RNNConfig, build
from cdopt_tutorial.parameter_server.system import Job, run


def expected_bytes(config: RNNConfig, vocab_size: int) -> int:
    """Bytes of the large tensors of one full window, of all trainers together.

    Word vectors, the LSTM's outputs and, with the cut "logits", the logits are sent one
    way, and their gradients the other; several trainers pull the LSTM's weights. An
    index has 8 bytes. The messages around them, 5 to 7 kB per step and trainer whatever
    the sizes, are not counted: they are below one per cent from about a megabyte on.
    """
    tokens = config.seq_len * config.batch_size
    width, indices = config.embedding + config.hidden, tokens
    if config.cut == "logits":
        width += vocab_size
    else:
        indices += tokens  # the targets are sent, too
    numbers = tokens * width
    if config.num_trainers > 1:
        weights = build("rnn", vocab_size, config).parameters()
        numbers += config.num_trainers * sum(weight.numel() for weight in weights)
    return 2 * numbers * config.torch_dtype.itemsize + 8 * indices


def measured_bytes(job: Job) -> float:
    """Bytes per step, as the workers' sockets count; NaN for a text of one window."""
    text = Stream(job.corpus.train, job.config.seq_len, job.config.batch_size)
    job = replace(job, resume=None, keep=None)
    return training.measured_bytes(run, job, len(text) - 1)
