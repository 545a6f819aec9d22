"""The subcommands, a file each; ``training`` has what those of the systems share.

A system's has ``run(arguments)``. The book's have ``add(parser)``, which adds their
flags, and ``run(args)``. Each returns the exit code.
"""

COMMANDS = {
    "reinforce": "chapter 1: train an agent and its observers on CartPole",
    "rnn": "chapter 2: train an RNN split over a trainer and a server",
    "hybrid": "chapter 5: train a table by RPC, and replicas of a layer by DDP",
    "shard": "chapter 6: train a transformer in copies, shards, parts or stages",
    "rollouts": "chapter 8: let observers play ahead of the agent",
    "execute": "run chapters that have no result yet, compare their figures",
    "build": "run the chapters, then render the book",
}
