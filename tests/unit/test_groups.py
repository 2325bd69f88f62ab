"""Process groups: the ranks that share something are those of the libraries' device meshes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from accelerate import ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from backend.config import RunSpec
from backend.config.options import edit, effective
from backend.inspect.facts import InputFacts
from backend.machine import machines
from backend.memory.groups import groups, sharded_state
from backend.resolve import ResolvedRun, resolve
from backend.rules.examples import DEMO

WORLD = 16


def spec_and_run(**changes: object) -> tuple[RunSpec, ResolvedRun]:
    values = {"launch.rendezvous": "static", "launch.nproc_per_node": 8, "launch.master_addr": "node-0"}
    patch = {**values, **{key.replace("__", "."): value for key, value in changes.items()}}
    spec = effective(edit(RunSpec(), patch))
    return spec, resolve(spec, machines()["2x8x80gb"], InputFacts())


def of_rank(found: tuple[RunSpec, ResolvedRun], rank: int) -> dict[str, list[int]]:
    return {group.name: group.of(rank) for group in groups(*found)}


@pytest.fixture
def mesh_of_rank(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Builds a device mesh as the rank would, without other processes."""

    def build(rank: int, make) -> DeviceMesh:  # type: ignore[no-untyped-def]
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        try:
            return make()
        finally:
            dist.destroy_process_group()

    return build


@pytest.mark.parametrize("rank", [0, 5, 8, 15])
@pytest.mark.parametrize(("replicas", "context"), [(1, 1), (2, 1), (4, 1), (1, 2), (2, 4)])
def test_fsdp2_groups_are_those_of_accelerate(mesh_of_rank, rank: int, replicas: int, context: int) -> None:  # type: ignore[no-untyped-def]
    run = spec_and_run(
        parallel__strategy="fsdp2", parallel__replicate_size=replicas, parallel__context_parallel_size=context
    )
    config = ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=WORLD // replicas // context, cp_size=context)
    found = of_rank(run, rank)

    def ranks() -> dict[str, list[int]]:
        mesh = config.build_device_mesh("cpu")
        names = {"replicate": ["dp_replicate"], "shard": config.dp_shard_cp_dim_names, "context": ["cp"]}
        return {name: mesh[tuple(dims)].mesh.flatten().tolist() for name, dims in names.items() if name in found}

    assert mesh_of_rank(rank, ranks) == found
    assert set(found) == {"shard"} | ({"replicate"} if replicas > 1 else set()) | (
        {"context"} if context > 1 else set()
    )


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("rank", [0, 3, 12])
def test_tensor_parallel_groups_are_innermost(mesh_of_rank, rank: int, size: int) -> None:  # type: ignore[no-untyped-def]
    found = spec_and_run(parallel__strategy="tensor", parallel__tensor_parallel_size=size)

    def ranks() -> dict[str, list[int]]:
        # As in transformers 5.23 distributed/utils.py: FSDP outside, tensor parallelism inside.
        mesh = init_device_mesh("cpu", (WORLD // size, size), mesh_dim_names=("fsdp", "tp"))
        return {"tensor": mesh["tp"].mesh.tolist(), "shard": mesh["fsdp"].mesh.tolist()}

    assert mesh_of_rank(rank, ranks) == of_rank(found, rank)


@pytest.mark.parametrize(
    ("strategy", "state"),
    [
        ("ddp", []),
        ("zero1", ["optimizer state"]),
        ("zero2", ["gradients", "optimizer state"]),
        ("zero3", ["weights", "gradients", "optimizer state"]),
        ("fsdp2", ["weights", "gradients", "optimizer state"]),
    ],
)
def test_all_ranks_share_what_the_strategy_shards(strategy: str, state: list[str]) -> None:
    found = spec_and_run(parallel__strategy=strategy)
    assert of_rank(found, 3) == {"shard" if state else "replicate": list(range(WORLD))}
    assert sharded_state(found[1]) == state


def test_fsdp1_with_hybrid_shard_shards_within_a_node() -> None:
    found = spec_and_run(parallel__strategy="fsdp1", parallel__sharding_strategy="hybrid_shard")
    assert of_rank(found, 11) == {"shard": list(range(8, 16)), "replicate": [3, 11]}
    run = found[1]
    assert (run.parameter_shards, run.gradient_shards, run.optimizer_shards) == (8, 8, 8)


@pytest.mark.parametrize("sharding", ["full_shard", "shard_grad_op"])
def test_fsdp1_shards_over_all_ranks(sharding: str) -> None:
    found = spec_and_run(parallel__strategy="fsdp1", parallel__sharding_strategy=sharding)
    assert of_rank(found, 11) == {"shard": list(range(WORLD))}


@pytest.mark.parametrize(
    ("strategy", "sizes"),
    [
        ("fsdp2", {"replicate_size": 3}),
        ("fsdp2", {"replicate_size": 6}),
        ("fsdp2", {"replicate_size": 12}),
        ("fsdp2", {"replicate_size": 32}),
        ("fsdp2", {"context_parallel_size": 3}),
        ("fsdp2", {"replicate_size": 8, "context_parallel_size": 4}),
        ("zero3", {"sequence_parallel_size": 5}),
        ("zero0", {"sequence_parallel_size": 32}),
        ("tensor", {"tensor_parallel_size": 6}),
        ("tensor", {"tensor_parallel_size": 32}),
    ],
)
def test_sizes_that_do_not_divide_the_world_size_have_no_groups(strategy: str, sizes: dict[str, int]) -> None:
    options = {f"parallel__{name}": size for name, size in sizes.items()}
    assert groups(*spec_and_run(parallel__strategy=strategy, **options)) == []


def test_single_process_has_no_groups() -> None:
    assert groups(RunSpec(), resolve(RunSpec(), machines()["1x80gb"], InputFacts())) == []


@pytest.mark.parametrize(("size", "steps"), [(1, 3), (2, 6), (4, 12)])
def test_the_ranks_of_a_sequence_parallel_group_read_as_many_batches_each(size: int, steps: int) -> None:
    """9 batches on 4 ranks: each reads 3, and the group trains on those of its ranks one after the other."""
    chosen = {"parallel.strategy": "zero3", "launch.nproc_per_node": 4, "parallel.sequence_parallel_size": size}
    spec = edit(RunSpec(), {**chosen, "train.per_device_train_batch_size": 4, "train.num_train_epochs": 2.0})
    run = resolve(spec, machines()["2x8x80gb"], replace(DEMO, num_examples=36))
    assert (run.steps_per_epoch, run.total_steps) == (steps, 2 * steps)
