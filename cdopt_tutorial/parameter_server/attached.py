"""What attaches to the system from outside, in its workers."""

from cdopt_tutorial.engines import gradients, trace


def mark_phases() -> None:
    """Mark a step's phases in the trace: forward, backward, optimizer.

    Called in every worker, by :func:`~cdopt_tutorial.engines.launch.launch`.
    """
    from cdopt_tutorial.parameter_server.system import Trainer  # which imports this

    trace.mark(Trainer.loss, "forward")
    trace.mark(gradients.backward, "backward")
    trace.mark(Trainer.update, "optimizer")
