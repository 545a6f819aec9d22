"""Devices: what is asked for against what is there. No GPU is needed to see it."""

import subprocess
import sys

import pytest
import roles
import torch

from cdopt_tutorial.cli import main
from cdopt_tutorial.engines import (
    Role,
    Wire,
    WorkerError,
    group,
    launch,
    process,
    serve,
)
from cdopt_tutorial.engines.device import check_device_maps, gpus_of, pick_device
from cdopt_tutorial.hybrid import HybridConfig
from cdopt_tutorial.publish import execute
from cdopt_tutorial.reinforce import ReinforceConfig


@pytest.fixture
def have(monkeypatch):
    """Let torch see so many GPUs, by a build with CUDA."""

    def see(count, driver=True):
        there = bool(count) and driver
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


@pytest.fixture
def no_process_starts(monkeypatch):
    def start(*_):
        raise AssertionError("a process was about to start")

    monkeypatch.setattr(group.Group, "_start", start)


class TestPicking:
    @pytest.mark.parametrize("count", range(5))
    @pytest.mark.parametrize(
        "wish", ["auto", "cpu", "cuda", "cuda:0", "cuda:1", "cuda:3"]
    )
    def test_is_of_what_is_there_or_refused(self, wish, count, have):
        have(count)
        _, _, number = wish.partition(":")
        needed = int(number) + 1 if number else int(wish == "cuda")
        if count < needed:
            with pytest.raises(ValueError, match=f"device is '{wish}', but"):
                pick_device(wish)
            return
        picked = pick_device(wish)
        assert picked == (("cuda" if count else "cpu") if wish == "auto" else wish)
        assert pick_device(picked) == picked

    @pytest.mark.parametrize("count", range(1, 5))
    def test_a_device_stands_for_gpus(self, count, have):
        have(count)
        every = tuple(f"cuda:{number}" for number in range(count))
        assert gpus_of("cuda") == every
        assert [gpus_of(gpu) for gpu in every] == [(gpu,) for gpu in every]
        assert gpus_of("cpu") == gpus_of(f"cuda:{count}") == ()

    @pytest.mark.parametrize(
        ("count", "there"),
        [
            (0, "torch sees no GPU"),
            (1, "the only GPU is cuda:0"),
            (3, "the GPUs are cuda:0 to cuda:2"),
        ],
    )
    def test_a_refusal_says_in_one_line_what_is_there(self, count, there, have):
        have(count)
        with pytest.raises(ValueError) as caught:
            pick_device("cuda:7")
        assert str(caught.value) == f"device is 'cuda:7', but {there}"

    def test_a_build_without_cuda_is_told(self, have, monkeypatch):
        have(0)
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
        with pytest.raises(ValueError, match="is a build without CUDA$"):
            pick_device("cuda")

    def test_a_gpu_that_the_driver_can_not_run_does_not_count(self, have):
        have(2, driver=False)
        assert pick_device("auto") == "cpu"
        with pytest.raises(ValueError, match="torch sees no GPU"):
            pick_device("cuda")

    @pytest.mark.parametrize(
        "wish", ["abacus", "", "CPU", "cuda:", "cuda:-1", "cuda:01", "cpu:0", 0, None]
    )
    def test_other_names_are_refused(self, wish, have):
        have(4)
        with pytest.raises(ValueError) as caught:
            pick_device(wish)
        allowed = "auto, cpu, cuda or cuda:N"
        assert str(caught.value) == f"device is {wish!r}, but must be {allowed}"

    @pytest.mark.parametrize("config", [HybridConfig, ReinforceConfig])
    def test_a_config_has_the_device_that_is_used(self, config, have):
        have(0)
        assert config(device="auto").device == "cpu"
        with pytest.raises(ValueError, match="device is 'cuda', but"):
            config(device="cuda")
        have(2)
        assert config(device="auto").device == "cuda"
        assert config(device="cuda:1").device == "cuda:1"


@pytest.mark.parametrize(("count", "used"), [(0, "cpu"), (2, "cuda")])
def test_chapters_are_run_on_the_device_that_is_used(count, used, have, monkeypatch):
    have(count)
    told = []

    def note(_, *, device, **__):
        told.append(device)
        return []

    monkeypatch.setattr(execute, "execute", note)
    assert main(["execute", "--device", "auto"]) == 0
    assert told == [used]
    assert main(["execute", "--device", "cuda:2"]) == 2
    assert told == [used]


def test_the_fork_server_asks_for_no_gpu():
    # A process that has asked can't fork one that uses a GPU.
    script = f"""
import importlib, torch
def ask(*_):
    raise AssertionError("asked")
torch.cuda.is_available = torch.cuda.device_count = torch.cuda._lazy_init = ask
for module in {group.PRELOAD!r}:
    importlib.import_module(module)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def maps(**of_trainer):
    return {
        "trainer": Role(serve, device_maps=of_trainer),
        "ps": Role(serve),
    }


@pytest.mark.usefixtures("no_process_starts")
class TestDeviceMapsRefused:
    @pytest.mark.parametrize(
        ("of_trainer", "message"),
        [
            ({"master": {"cuda:0": "cuda:0"}}, "to master is to none of the workers"),
            ({"ps": {"abacus": "cuda:0"}}, "has 'abacus', but must have cpu or cuda:N"),
            ({"ps": {"cuda:0": "cuda"}}, "has 'cuda', but must have cpu or cuda:N"),
            ({"ps": {0: 1}}, "has 0, but must have cpu or cuda:N"),
            ({"ps": {"cuda:2": "cuda:0"}}, "has 'cuda:2', but the GPUs are cuda:0 to"),
            ({"ps": {"cuda:0": "cuda:2"}}, "has 'cuda:2', but the GPUs are cuda:0 to"),
            ({"ps": {"cuda:0": "cuda:1", "cuda:1": "cuda:1"}}, "must be one-to-one"),
            ({"ps": {"cpu": "cuda:1", "cuda:1": "cuda:1"}}, "must be one-to-one"),
        ],
    )
    def test_before_any_process_starts_in_one_line(self, of_trainer, message, have):
        have(2)
        with pytest.raises(ValueError, match=message) as caught:
            launch(maps(**of_trainer))
        assert str(caught.value).startswith("the device map of trainer to ")
        assert "\n" not in str(caught.value)

    def test_where_there_is_no_gpu(self, have):
        have(0)
        with pytest.raises(ValueError, match="has 'cuda:0', but torch sees no GPU"):
            launch(maps(ps={"cuda:0": "cuda:0"}))

    def test_where_bytes_are_counted(self):
        with pytest.raises(ValueError, match="bytes can't be counted"):
            launch(maps(ps={"cpu": "cpu"}), polling=False, wire=Wire())


class TestDeviceMaps:
    def settings(self, device_maps, polling=True):
        return process.Settings(
            world_size=2,
            folder="/nowhere",
            rpc_timeout=7,
            rpc_threads=3,
            polling=polling,
            device_maps=device_maps,
            modules=(),
            attach=None,
            traced=False,
            counted=False,
        )

    def test_all_that_fit_pass(self, have):
        have(2)
        swap = {"cuda:0": "cuda:1", "cuda:1": "cuda:0", "cpu": "cpu"}
        check_device_maps({"trainer": {"ps": swap}, "ps": {"trainer": swap}})

    @pytest.mark.parametrize("polling", [True, False])
    def test_each_worker_gets_its_own(self, polling):
        device_maps = {"trainer": {"ps": {"cuda:1": "cuda:0"}}, "ps": {}}
        settings = self.settings(device_maps, polling)
        own = process.rpc_options(settings, "trainer")
        here, there = torch.device("cuda:1"), torch.device("cuda:0")
        assert own.device_maps == {"ps": {here: there}}
        assert process.rpc_options(settings, "ps").device_maps == {}
        assert (own.rpc_timeout, own.num_worker_threads) == (7, 3)

    @pytest.mark.parametrize(
        ("polling", "mapped", "channels"),
        [(True, False, None), (True, True, None), (False, True, None)]
        + [(False, False, ["basic"])],
    )
    def test_any_map_lets_all_workers_use_every_channel(
        self, polling, mapped, channels, monkeypatch
    ):
        given = []
        monkeypatch.setattr(
            process.rpc,
            "TensorPipeRpcBackendOptions",
            lambda **options: given.append(options["_channels"]),
        )
        device_maps = {"trainer": {"ps": {"cpu": "cpu"}} if mapped else {}, "ps": {}}
        for worker in device_maps:
            process.rpc_options(self.settings(device_maps, polling), worker)
        assert given == [channels] * 2

    def test_calls_go_on_by_a_map_of_the_cpu(self):
        asking = Role(
            roles.converse, ("other", 2), device_maps={"other": {"cpu": "cpu"}}
        )
        for polling in (True, False):
            system = {"agent": asking, "other": Role(serve)}
            assert launch(system, polling=polling)["agent"] == "other"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_map_reaches_the_agent_of_torch(self, have):
        have(1)  # in this process; the workers' torch sees none, and says so
        with pytest.raises(WorkerError) as caught:
            launch(maps(ps={"cuda:0": "cuda:0"}))
        assert "invalid indices in its device map for ps" in str(caught.value)
