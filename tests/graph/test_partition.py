"""The partition is optimal: compared with every possible cutting of small models, and fast on large ones."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydra_tune.core.errors import HydraTuneError, Infeasible
from hydra_tune.graph.costs import NodeCost, ShardCost, as_json, from_json, shard_cost
from hydra_tune.graph.partition import MIB, partition, smallest_budget

pytestmark = pytest.mark.smoke


def node(name: str = "n", **costs: object) -> NodeCost:
    """A node of one second that takes nothing but what is named."""
    zero = dict.fromkeys([
        "step_seconds", "parameter_bytes", "optimizer_bytes", "buffer_bytes", "largest_parameter_bytes",
        "activation_bytes", "forward_peak_bytes", "backward_peak_bytes", "boundary_bytes",
    ], 0)  # fmt: skip
    return NodeCost(**{"name": name, "forward_seconds": 1.0, "backward_seconds": 0.0, **zero, **costs})  # type: ignore[arg-type]


SIZES = st.integers(0, 4 * MIB)


@st.composite
def models(draw: st.DrawFn) -> list[NodeCost]:
    """Up to nine nodes, with up to two parameters that later nodes use again."""
    nodes = [
        NodeCost(
            name=f"n{i}", forward_seconds=draw(st.integers(0, 5)), backward_seconds=draw(st.integers(0, 5)),
            step_seconds=draw(st.integers(0, 2)), parameter_bytes=draw(SIZES), optimizer_bytes=draw(SIZES),
            buffer_bytes=draw(st.integers(0, 9)), largest_parameter_bytes=draw(SIZES), activation_bytes=draw(SIZES),
            saved_input_bytes=draw(st.integers(0, 5)), forward_peak_bytes=draw(SIZES),
            backward_peak_bytes=draw(SIZES), boundary_bytes=draw(SIZES),
            cut_allowed=draw(st.sampled_from([True, True, True, False])), preferred=draw(st.booleans()),
        )
        for i in range(draw(st.integers(1, 9)))
    ]  # fmt: skip
    for name in draw(st.sampled_from([(), ("w",), ("w", "v")])):
        owner, size = draw(st.integers(0, len(nodes) - 1)), draw(SIZES)
        nodes[owner] = replace(nodes[owner], shared={**nodes[owner].shared, name: size})
        for user in draw(st.sets(st.integers(owner, len(nodes) - 1))) - {owner}:
            nodes[user] = replace(nodes[user], tied={**nodes[user].tied, name: size})
    return nodes


def cuttings(nodes: Sequence[NodeCost], deferred: bool, input_bytes: int) -> Iterator[list[ShardCost]]:
    """Every way to cut where it is allowed."""
    allowed = [i + 1 for i, each in enumerate(nodes[:-1]) if each.cut_allowed]
    for count in range(len(allowed) + 1):
        for cuts in itertools.combinations(allowed, count):
            yield [
                shard_cost(nodes, i, j, deferred=deferred, input_bytes=input_bytes)
                for i, j in itertools.pairwise([0, *cuts, len(nodes)])
            ]


def rank(shards: Sequence[ShardCost], nodes: Sequence[NodeCost]) -> tuple[float, ...]:
    """Fewest shards, least slowest, most preferred cuts, fewest bytes across cuts."""
    last = [nodes[shard.stop - 1] for shard in shards[:-1]]
    preferred = sum(each.preferred for each in last)
    return len(shards), max(s.seconds for s in shards), -preferred, sum(each.boundary_bytes for each in last)


@settings(max_examples=300, deadline=None)
@given(models(), st.integers(1, 120), st.booleans(), SIZES, st.sampled_from([0.0, 0.1, 0.25]))
def test_it_is_the_best_of_all_cuttings(
    nodes: list[NodeCost], mebibytes: int, deferred: bool, batch: int, fraction: float
) -> None:
    budget = mebibytes * MIB
    room = budget * (1 - fraction)
    fitting = [c for c in cuttings(nodes, deferred, batch) if all(shard.device_bytes <= room for shard in c)]
    options = {"input_bytes": batch, "transfer_fraction": fraction, "deferred": deferred}
    if not fitting:
        with pytest.raises(Infeasible):
            partition(nodes, budget, **options)
        return
    found = partition(nodes, budget, **options)
    assert rank(found.shards, nodes) == min(rank(shards, nodes) for shards in fitting)
    assert found.device_bytes <= room
    assert all(nodes[cut - 1].cut_allowed for cut in found.cuts)
    assert [found.shards[0].start, *found.cuts] == [shard.start for shard in found.shards]
    assert found.shards[-1].stop == len(nodes)


@settings(max_examples=200, deadline=None)
@given(models(), st.booleans(), SIZES, st.sampled_from([0.0, 0.1, 0.3]))
def test_the_smallest_budget_is_enough_and_a_mebibyte_less_is_not(
    nodes: list[NodeCost], deferred: bool, batch: int, fraction: float
) -> None:
    options = {"input_bytes": batch, "transfer_fraction": fraction, "deferred": deferred}
    least = smallest_budget(nodes, **options)
    assert least % MIB == 0
    partition(nodes, least, **options)
    if least == MIB:
        return
    with pytest.raises(Infeasible) as caught:
        partition(nodes, least - MIB, **options)
    assert caught.value.smallest_budget == least
    assert f"device_memory for this model is {least // MIB}MiB" in str(caught.value)
    assert caught.value.node in {each.name for each in nodes}
    assert caught.value.needed_bytes > (least - MIB) * (1 - fraction)


def test_one_shard_whenever_all_fits() -> None:
    nodes = [node(f"n{i}", parameter_bytes=MIB, preferred=True) for i in range(10)]
    assert partition(nodes, 10 * MIB, transfer_fraction=0).cuts == ()
    assert len(partition(nodes, 10 * MIB).shards) == 2, "a tenth is the transfer buffer"


def test_a_cut_falls_where_little_crosses_although_greedy_would_go_further() -> None:
    # Three nodes fill the first shard, but what crosses the cut after them leaves too little room for the others.
    sizes, crossing = [1, 2, 1, 2, 2, 3], [9, 0, 4, 9, 9, 0]
    nodes = [node(parameter_bytes=s * MIB, boundary_bytes=b * MIB) for s, b in zip(sizes, crossing, strict=True)]
    assert shard_cost(nodes, 0, 3).device_bytes == 8 * MIB
    assert shard_cost(nodes, 3, 6).device_bytes == 11 * MIB
    assert partition(nodes, 8 * MIB, transfer_fraction=0).cuts == (2,)


def test_shards_are_balanced_and_equal_balance_prefers_the_users_cut() -> None:
    nodes = [node(f"n{i}", parameter_bytes=MIB) for i in range(5)]
    assert partition(nodes, 4 * MIB, transfer_fraction=0).cuts in {(2,), (3,)}
    for wished in (1, 2):
        marked = [replace(each, preferred=i == wished) for i, each in enumerate(nodes)]
        assert partition(marked, 4 * MIB, transfer_fraction=0).cuts == (wished + 1,)


def test_what_is_too_large_is_named_with_the_budget_that_would_do() -> None:
    nodes = [node("stem", parameter_bytes=MIB), node("embedding", parameter_bytes=30 * MIB), node("head")]
    with pytest.raises(Infeasible) as caught:
        partition(nodes, 10 * MIB)
    assert str(caught.value) == (
        "node 'embedding' needs 30.0 MiB on a device, where a shard may take 9.0 MiB of 10.0 MiB "
        "(the smallest device_memory for this model is 34MiB)"
    )
    assert isinstance(caught.value, HydraTuneError)
    assert caught.value.needed_bytes == 30 * MIB
    assert pickle.loads(pickle.dumps(caught.value)).smallest_budget == 34 * MIB
    with pytest.raises(Infeasible, match="nodes 'stem' to 'embedding' need"):
        partition([replace(nodes[0], cut_allowed=False), *nodes[1:]], 10 * MIB)


def test_a_shard_counts_everything_its_backward_holds() -> None:
    first = node("a", parameter_bytes=100, optimizer_bytes=200, buffer_bytes=3, largest_parameter_bytes=60,
                 activation_bytes=1000, forward_peak_bytes=7, backward_peak_bytes=5, boundary_bytes=10_000)  # fmt: skip
    second = replace(first, name="b", forward_peak_bytes=0, backward_peak_bytes=9, boundary_bytes=20_000)
    cost = shard_cost([first, second], 0, 1, deferred=False, input_bytes=50)
    assert cost.device_bytes == 100 + 200 + 3 + 1000 + 50 + 10_000 + 60 + 7
    assert cost.state_bytes == 303
    assert shard_cost([first, second], 1, 2, deferred=False).device_bytes == 1363 + 10_000 + 20_000 + 9
    saves_its_input = replace(second, saved_input_bytes=400)
    assert shard_cost([first, saves_its_input], 1, 2).device_bytes == 1363 + 9_600 + 20_000 + 9
    both = shard_cost([first, second], 0, 2, deferred=True, input_bytes=50)
    assert both.device_bytes == 2 * (1303 + 100) + 50 + 20_000 + 9


def test_a_tied_parameter_is_there_once_with_its_owner_and_once_in_each_other_shard() -> None:
    embedding = node("embedding", parameter_bytes=100, largest_parameter_bytes=100, shared={"weight": 100})
    head = node("head", tied={"weight": 100})
    nodes = [embedding, node("block"), head, head]
    together = shard_cost(nodes, 0, 4, deferred=False)
    assert (together.parameter_bytes, together.tied_bytes, together.gradient_bytes) == (100, 0, 200)
    apart = shard_cost(nodes, 1, 4, deferred=False)
    assert (apart.parameter_bytes, apart.tied_bytes, apart.gradient_bytes) == (0, 100, 100)
    assert shard_cost(nodes, 0, 4, deferred=True).gradient_bytes == 100
    assert shard_cost(nodes, 1, 4, deferred=True).gradient_bytes == 100


def test_costs_survive_json() -> None:
    nodes = (node("a", shared={"w": 3}, preferred=True), node("b", tied={"w": 3}, cut_allowed=False))
    assert from_json(as_json(nodes)) == nodes
    for text in ('[{"name": "a"}]', "[3]", "{", '[{"other": 1}]'):
        with pytest.raises(ValueError):
            from_json(text)


def test_nothing_to_cut_and_impossible_fractions() -> None:
    with pytest.raises(ValueError, match="without nodes"):
        partition([], MIB)
    with pytest.raises(ValueError, match="transfer_fraction cannot be 1"):
        partition([node()], MIB, transfer_fraction=1)


def test_a_thousand_nodes_with_tied_parameters() -> None:
    """How long it takes (20 ms) is for a benchmark; here, that large models come out whole and fit."""
    draw = random.Random(0)
    nodes = [
        node(f"n{i}", forward_seconds=draw.random(), parameter_bytes=draw.randrange(MIB),
             boundary_bytes=draw.randrange(MIB), activation_bytes=draw.randrange(MIB),
             backward_peak_bytes=draw.randrange(MIB),
             tied={"w": MIB} if i % 100 == 99 else {}, shared={"w": MIB} if i == 0 else {})
        for i in range(1000)
    ]  # fmt: skip
    found = partition(nodes, 64 * MIB)
    assert found.device_bytes <= 0.9 * 64 * MIB
    assert sum(shard.parameter_bytes for shard in found.shards) == sum(each.parameter_bytes for each in nodes)
    assert 10 < len(found.shards) < 100
