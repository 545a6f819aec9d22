"""Devices that are wanted, and those that are there; without a GPU."""

import subprocess
import sys
from unittest.mock import Mock

import pytest
import torch

from cdopt_tutorial.calls.device import device_for, gpus_of, pick_device
from cdopt_tutorial.cli import main
from cdopt_tutorial.dissolving import memory
from cdopt_tutorial.hybrid import HybridConfig
from cdopt_tutorial.parameter_server import RNNConfig
from cdopt_tutorial.publish import execute
from cdopt_tutorial.reinforce import ReinforceConfig
from cdopt_tutorial.run import forking, process_group
from cdopt_tutorial.sharding import ShardConfig

CONFIGS = HybridConfig, ReinforceConfig, RNNConfig, ShardConfig, memory.MemoryConfig


@pytest.fixture
def have(monkeypatch):
    """Have torch see so many GPUs."""

    def see(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        # Which also counts one whose driver is too old.
        monkeypatch.setattr(torch.cuda, "device_count", lambda: max(1, count))

    return see


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_a_device_is_of_what_is_there_or_refused(count, have):
    have(count)
    gpus = tuple(f"cuda:{number}" for number in range(count))
    assert pick_device("auto") == ("cuda" if count else "cpu")
    assert (pick_device("cpu"), gpus_of("cpu")) == ("cpu", ())
    of = {"cuda": gpus, "cuda:0": gpus[:1], "cuda:1": gpus[1:2], "cuda:3": gpus[3:]}
    for wish in of:
        assert gpus_of(wish) == of[wish]
        # Workers take the GPUs in turn.
        taken = [*(of[wish] or [wish]) * 5][:5]
        assert [device_for(wish, worker) for worker in range(5)] == taken
        if of[wish]:
            assert pick_device(wish) == wish
            continue
        said = f"^device is '{wish}', but torch sees {count} GPU"
        with pytest.raises(ValueError, match=said):
            pick_device(wish)
    for wish in ("abacus", "", "CPU", "cuda:", "cuda:-1", "cpu:0", 0):
        said = f"^device is {wish!r}, but must be auto, cpu, cuda or cuda:N$"
        with pytest.raises(ValueError, match=said):
            pick_device(wish)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_config_has_the_device_that_is_used(config, have):
    have(0)
    assert config(device="auto").device == "cpu"
    with pytest.raises(ValueError, match="device is 'cuda', but"):
        config(device="cuda")
    have(2)
    assert config(device="auto").device == "cuda"


def test_chapters_are_run_on_the_device_that_is_used(have, monkeypatch):
    have(2)
    monkeypatch.setattr(execute, "execute", run := Mock(side_effect=OSError))
    assert main(["execute", "--device", "auto"]) == 1
    assert run.call_args.args[0].device == "cuda"
    for command in "execute", "build":
        assert main([command, "--device", "cuda:2"]) == 2


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_group_is_joined_with_its_gpu_chosen(count, monkeypatch):
    done = []
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    note = "torch.distributed.init_process_group"
    monkeypatch.setattr(note, lambda backend, *_, **__: done.append(backend))
    gpus = [f"cuda:{number}" for number in range(count)]
    process_group.join(1, 2, gpus, ddp_only=True)
    # The device comes first, since NCCL takes the current one.
    assert done == [["gloo"], ["cuda:0", "gloo"], ["cuda:1", "nccl"]][count]


def test_the_fork_server_asks_for_no_gpu():
    # After initialising CUDA, a process can't fork one that uses a GPU.
    script = f"""
import importlib, torch
def fail(*_):
    raise AssertionError("CUDA is initialised")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = fail
for module in {forking.PRELOAD!r}:
    importlib.import_module(module)
print("all imported", flush=True)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "all imported\n"  # its exit code is 0 in any case
