"""Faults of the original listings, shown without their code."""

import socket

import hybrid_roles
import pytest
import torch
import torch.distributed as dist

from cdopt_tutorial.run import Role, launch, serve


def test_a_perfect_policy_counts_as_solved_after_59_rounds():
    running_reward, rounds = 0, 0
    while not running_reward > 475:
        running_reward = 0.05 * 500 + (1 - 0.05) * running_reward
        rounds += 1
    assert rounds == 59


def test_a_port_that_is_taken_is_an_error():
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match="EADDRINUSE"):
            dist.TCPStore("localhost", port, is_master=True, wait_for_workers=False)


def test_the_gradient_of_a_table_is_as_large_as_the_table():
    rows = {}
    for sparse in (False, True):
        table = torch.nn.EmbeddingBag(100, 16, mode="sum", sparse=sparse)
        table(torch.tensor([3, 7, 3]), torch.tensor([0, 2])).sum().backward()
        gradient = table.weight.grad
        rows[sparse] = len(gradient.coalesce().values() if sparse else gradient)
    assert rows == {False: 100, True: 2}


def test_who_waits_for_the_first_trainer_does_not_see_the_second_fail():
    roles = {name: Role(serve) for name in ("trainer0", "trainer1")}
    found = launch(roles | {"master": Role(hybrid_roles.wait_both_ways)})["master"]
    by_the_book, by_the_original = found
    assert "seven times six" in by_the_book
    assert "RPC ran for more than" in by_the_original
    assert "seven times six" not in by_the_original
