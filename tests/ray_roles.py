"""What dies in the tests of Ray; importable by the workers."""

import os
import signal

from cdopt_tutorial.calls import network
from cdopt_tutorial.parameter_server.system import Owner, Trainer
from cdopt_tutorial.probes.attach import wrap


def die_once(folder, trainer_step, owner_step):
    """The trainer dies in one step of the training, and later the server in another."""
    of_trainer, of_owner = folder / "trainer", folder / "owner"
    steps = []

    def train(function, trainer, *args):
        if len(trainer.history.losses) == trainer_step and not of_trainer.exists():
            of_trainer.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(trainer, *args)

    def step(function, owner, *args):
        steps.append(1)
        last = of_trainer.exists() and len(steps) == owner_step
        # The trainer may have an owner, too.
        on_server = network.current().own_name() == "ps"
        if last and on_server and not of_owner.exists():
            of_owner.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(owner, *args)

    wrap(Trainer.step, train)
    wrap(Owner._move, step)
