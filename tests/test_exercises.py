"""The checks of the exercises: solutions are right, and mistakes are named.

A wrong attempt is the published solution with an edit.
"""

import ast
import math
import os
import re
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from IPython.core.inputtransformer2 import TransformerManager

from cdopt_tutorial import exercises
from cdopt_tutorial.publish.chapter import read_chapter, tagged
from cdopt_tutorial.publish.project import this_project


@dataclass
class Exercise:
    label: str
    attempt: str  #: an expression of what the solution has defined
    #: A part of what is said of others, or of the solution with one text replaced.
    wrong: dict[str | tuple[str, str], str]
    before: str = ""  #: what the solution needs of the chapter
    runs: bool = True  #: whether it runs, or only its definitions are made


TABLE = [
    Exercise("ex-death", "roles", {
        ("os._exit, (3,)", 'int, ("x",)'): "observer1 does not leave: observer1 raised",
        "roles | {'observer0': Role(os._exit, (3,)), 'observer1': Role(serve)}":
            "the error names 'observer0', and not 'observer1'",
    }),
    Exercise("ex-seed", "OneSeed", {
        ("seed_of(0,", "seed_of(observer,"): "observer1's seed for environments is",
    }, runs=False),
    Exercise("ex-dice", "master", {
        ("args=(i,)", "args=(0,)"): "both dice have the seed 0",
        ("rref.rpc_async().roll(1000) for rref in dice",
         "rpc.remote(w, Dice, args=(i,)).rpc_async().roll(1000)"
         " for i, w in enumerate(workers)"): "each round makes new dice",
    }, runs=False),
    Exercise("ex-plain", "step_plainly", {
        ("        optimizer.step()", "        weight.grad = dist_autograd."
         "get_gradients(context_id)[weight]; optimizer.step()"):
            "the weight is -0.5, and not 1: the step used the gradient",
    }, runs=False),
    Exercise("ex-line", "fit", {
        ("lr * gradients", "0 * gradients"): "and not 2",
        "lambda steps: (2.0, 1.0)": "in 60 steps there were only 0 calls to ps",
    }, runs=False),
    Exercise("ex-cut", "tuple(sent.values())", {
        "(sent['logits'] // 2, sent['loss'])": "gradients cross, too",
        "(sent['logits'], sent['loss'] // 4)": "a number has 4 bytes",
        "(2 * 4 * 35 * 20 * 10_000, sent['loss'])": "vectors and outputs cross, too",
    }),
    Exercise("ex-shortcut", "found[False]", {
        "'no context'": "there is no internal assertion in 'no context'",
    }, before="both = 'trainer0', 'trainer1'"),
    Exercise("ex-empty", "(uneven, here)", {
        ("(80, 1, 1)", "(1, 1, 1)"): "in some batch is 0, and not 2",
        ("run_locally(Job(small", "run_locally(Job(replace(small, seed=5)"):
            "off those of one process",
    }, before="digits, config, exact_steps = digit_bags(), HybridConfig(), 10\n"
       "same = {'dtype': 'float64', 'max_steps': 10, 'batch_size': 32}"),
    Exercise("ex-row", "train", {
        ("sum(found) / 2", "sum(found)"): "each gradient was applied whole",
        (" * len(labels) * 2 / 4", ""): "each trainer's mean counts alike",
    }, before="both = 'trainer0', 'trainer1'", runs=False),
    Exercise("ex-eight-death", "leave", {
        ("_played == 2", "_played == 3"): "before the last are 3, and not 2",
        ("os._exit(3)", "raise OSError"): "because observer1 raised OSError",
    }, before="config = RolloutsConfig(num_observers=3, num_envs=4, max_lag=2, "
       "max_episodes=240)", runs=False),
    Exercise("ex-eight-server", "lead", {
        ("append((worker, version))", "append((worker, version + 1))"):
            "note 0 names version 1, not yet there",
        ("self.w - 0.05", "self.w + 0.05"): "after the 14 gradients of the notes w is",
    }, runs=False),
    Exercise("ex-seven-kill", "([1, 1], 3)", {
        "([0, 1], 3)": "torchrun 0 ended well, and not with an error",
        "([1, 1], 6)": "the rounds in the agent's file are 6, and not 3",
    }, runs=False),  # the solution asserts these, and takes two torchruns
    Exercise("ex-seven-state", "before + anew", {
        "undisturbed": "the old generator drew them",
        "before": "the number of rounds is 4, and not 6",
    }),
    Exercise("ex-seven-sum", "trainer", {
        ('name="total"', 'name=f"total{rank}"'): "each trainer has a total of its own",
    }, runs=False),
    Exercise("ex-lazy", "border", {
        "border / 2": "the penalty lacks its factor 1/2",
        "2 * border": "the penalty has a factor 1/4",
    }),
    Exercise("ex-formula", "2 * q", {
        "q": "X is only",
        "10 * q": "A(X) is",
    }),
    Exercise("ex-own", "(layer.weight, layer.bias)", {
        ("square().sum(1, keepdim=True)", "square().sum(0, keepdim=True)"):
            "the norm of a row differs from 1 by",
        ("range(150)", "range(0)"): "of the digits are right",
    }),
    Exercise("ex-weak", "(end.weight, end.mapped, loose.perplexity, "
             "loose.projected.score.perplexity)", {
        "(0.1, 0.1, 146.0, 198.0)": "off, and W farther",
        "(0.1, 0.2, 198.0, 146.0)": "the perplexity of 198.0 falls to 146.0",
    }, before="corpus = data.load_corpus(max_vocab=1000)\n"
       "stacked = RNNConfig(embedding=64, hidden=64, manifold='stiefel')"),
    Exercise("ex-stale", "(found[True][0], found[False][0])", {
        "(0.5, 0.5)": "the staleness of those that wait is 0.5, and not 0",
        "(0, 0.0)": "asynchronous trainers have no stale gradient",
    }, before="corpus = data.load_corpus(max_vocab=1000)\n"
       "decoder = RNNConfig(embedding=64, hidden=64, manifold='stiefel', "
       "where='server', penalty_param=10.0)"),
    Exercise("ex-own-server", "trainer", {
        ("            loss = loss + rpc.rpc_sync(\"ps\", penalty, (layer,))\n", ""):
            "A(W) is off by",
    }, runs=False),
    Exercise("ex-six-forget", "of_rows", {
        ("momentum.chunk(ranks)", "momentum.chunk(1)"): "the update is off by",
    }, before="a, b, c = NEWTON_SCHULZ", runs=False),
    Exercise("ex-six-own", "climb", {
        ("ascend(x, diagonal, n).full_tensor()", "DTensor.from_local(ascend("
         "x.to_local(), diagonal.to_local(), n), mesh, [Shard(0)]).full_tensor()"):
            "after 2 steps x of rank0 is",
    }, before="problem = torch.full((6,), 6**-0.5), torch.arange(1.0, 7.0)",
       runs=False),
    Exercise("ex-nine-rule", "(rule / mean_life, best_then / mean_life)", {
        "(0.5**0.5, best_then / mean_life)": "the rule is the root of 2 C M",
        "(1, 1)": "the best interval is 1, and not 0.698",
    }),
    Exercise("ex-nine-spare", "fit", {
        ("Server, 3", "Server, 4"): "each took all four",
        ("(w - 3)", "(w - 2)"): "and not 3",
    }, runs=False),
]  # fmt: skip
EXERCISE = re.compile(r"^```\{exercise\}\n:label: (\S+)", re.MULTILINE)
LABEL = re.compile(r"^```\{(solution-start|solution-end)\} ?(\S*)", re.MULTILINE)


def of_chapter(label: str) -> tuple[list[str], list[str], str]:
    """A chapter's cells of code before the exercises, those of one solution, its check.

    The cell that checks an attempt stands below the attempt's.
    """
    for path in this_project().chapters():
        here, plain, solution, check = None, [], [], ""
        for cell in read_chapter(path).cells:
            for kind, name in LABEL.findall(cell.source):
                here = name if kind == "solution-start" else "another's"
            if cell.id == f"{label}-check":
                check = cell.source
            elif cell.cell_type == "code" and not tagged(cell, "remove-cell"):
                {None: plain, label: solution}.get(here, []).append(cell.source)
        if solution:
            return plain, solution, check


def test_every_exercise_has_a_cell_for_an_attempt_and_a_folded_one_that_checks_it():
    cells = [c for path in this_project().chapters() for c in read_chapter(path).cells]
    found = []
    for exercise, *two in zip(cells, cells[1:], cells[2:], strict=False):
        for label in EXERCISE.findall(exercise.source):
            found.append(label)
            assert [cell.id for cell in two] == [f"{label}-attempt", f"{label}-check"]
            assert all(tagged(cell, "remove-cell") for cell in two)
            attempt, check = two
            assert check.metadata.jupyter.source_hidden
            assert re.fullmatch(r"(# .+\n)+attempt = \.\.\.  # .+", attempt.source)
    assert sorted(found) == sorted(exercise.label for exercise in TABLE)


@pytest.mark.parametrize("attempt, said", [
    (..., ""),
    (lambda: 3, "right\n"),
    (lambda: 1 / 0, "worker raised ZeroDivisionError…: division by zero\n"),
    (lambda: os._exit(3), "worker exited with code 3 before it finished…\n"),
    (lambda: "3", "it returns '3', and not 3\n"),
    (lambda: torch.full((1,), 2.0), "it returns [2], and not 3\n"),
    (lambda: math.nan, "it returns nan, and not 3\n"),
    ((n for n in "3"), "the attempt is not of the form that is asked for: …\n"),
])  # fmt: skip
def test_whatever_is_attempted_is_answered(attempt, said, capsys):
    def twin(function):
        ended = exercises.play(worker=(function,))
        yield exercises.differs("it returns", ended["worker"], 3)

    exercises.check(twin, attempt)
    pattern = re.escape(said).replace("…", ".*")
    assert re.fullmatch(pattern, capsys.readouterr().out, re.DOTALL)


def test_an_attempt_that_hangs_is_ended(monkeypatch, capsys, limited):
    monkeypatch.setattr(exercises, "DEADLINE", 5.0)

    def twin(sleep):
        yield f"{exercises.play(worker=(sleep, 1e6))}"

    exercises.check(twin, time.sleep)
    said = capsys.readouterr().out
    assert said.startswith("worker missed the run's deadline of 5 s\n")


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    """The namespace of a `__main__` like a notebook's, in a folder of its own."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return vars(module)


DEFINITIONS = ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef


def run(source: str, namespace: dict, only: tuple = ()) -> None:
    """Run a cell without its asserts, which a wrong attempt would fail.

    With ``only``, its definitions, except for those that need what the chapter ran.
    """
    if written := re.match(r"%%writefile (\w+)\.py\n(.*)", source, re.DOTALL):
        Path(f"{written[1]}.py").write_text(written[2])
        sys.modules.pop(written[1], None)
        return
    for node in ast.parse(TransformerManager().transform_cell(source)).body:
        if isinstance(node, only or ast.stmt) and not isinstance(node, ast.Assert):
            with suppress(ImportError, NameError) if only else nullcontext():
                exec(compile(ast.Module([node], []), "cell", "exec"), namespace)


@pytest.mark.parametrize("exercise", TABLE, ids=lambda exercise: exercise.label)
def test_solution_is_right_and_mistakes_are_named(exercise, notebook, capsys):
    chapter, solution, check = of_chapter(exercise.label)
    for source in chapter:
        run(source, notebook, DEFINITIONS)
    exec(exercise.before, notebook)

    def solve(old="", new=""):
        assert any(old in source for source in solution), old
        for source in solution:
            source = source.replace(old, new)
            run(source, notebook, () if exercise.runs else DEFINITIONS)

    solve()
    cases = {exercise.attempt: "right"} | exercise.wrong
    for case in sorted(cases, key=lambda case: isinstance(case, tuple)):
        attempt = case
        if isinstance(case, tuple):
            solve(*case)
            attempt = exercise.attempt
        notebook["attempt"] = eval(attempt, notebook)
        capsys.readouterr()
        run(check, notebook)
        *_, line = capsys.readouterr().out.splitlines()
        assert cases[case] in line
        assert (line == "right") == (case == exercise.attempt)
