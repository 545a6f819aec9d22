"""``python -m cdopt_tutorial`` is the command, as torchrun starts it."""

from cdopt_tutorial.cli import entry

if __name__ == "__main__":
    entry()
