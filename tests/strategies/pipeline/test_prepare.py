"""Which stages a model gets: for one trial those of the shortest step, for several those that fill gaps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hydra_tune.graph.placement import PlacementInfeasible
from hydra_tune.strategies.pipeline.balanced import Chain
from hydra_tune.strategies.pipeline.prepare import PipelineLayout, lay_out, most_on_a_device
from hydra_tune.strategies.shard.prepare import Prospect, examine
from hydra_tune.training.loop import Training
from tests.strategies.shard.models import CPU, SEED, candidate

LAYERS = 8


class Own(nn.Linear):
    """Not torch's own layer, so nothing is known of its backward but how long it takes."""


def even_chain(folder: Path, kind: type[nn.Linear] = Own) -> Prospect:
    """Layers of one second forward and two backward; the first hands no gradient on, the head is small."""
    layers = [nn.Sequential(kind(6, 6), nn.ReLU()) for _ in range(LAYERS)]
    made = candidate("mlp", model=nn.Sequential(*layers, kind(6, 3)).double())
    training = Training(made, made.train, made.valid, SEED, CPU)
    prospect = examine(training, folder)
    seconds = [(1.0, 1.0), *[(1.0, 2.0)] * (LAYERS - 1), (0.2, 0.2)]
    nodes = tuple(
        replace(node, forward_seconds=forward, backward_seconds=backward, step_seconds=0.0)
        for node, (forward, backward) in zip(prospect.profile.nodes, seconds, strict=True)
    )
    return replace(prospect, profile=replace(prospect.profile, nodes=nodes))


def laid_out(prospect: Prospect, trials: int) -> PipelineLayout:
    return lay_out(prospect, 2, [1 << 30] * 2, 4, "1f1b", "best", lambda size: 0.0, trials=trials)


def test_a_trial_alone_gets_the_shortest_step_and_two_at_once_even_devices(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    prospect = even_chain(tmp_path)
    alone, shared = laid_out(prospect, 1), laid_out(prospect, 2)
    assert alone.prediction.seconds < shared.prediction.seconds
    assert max(shared.prediction.busy) < max(alone.prediction.busy)
    assert shared.prediction.shared_seconds(2) < alone.prediction.shared_seconds(2)
    assert [len(stage.nodes) for stage in shared.stages] == [LAYERS // 2, LAYERS // 2 + 1]


def test_where_the_last_micro_batch_goes_back_in_halves_even_devices_are_the_quickest_for_one_trial_too(
    tmp_path: Path,
) -> None:
    torch.manual_seed(SEED)
    prospect = even_chain(tmp_path, nn.Linear)
    alone, shared = laid_out(prospect, 1), laid_out(prospect, 2)
    assert alone.stages == shared.stages
    assert shared.stages[1].later_seconds == pytest.approx(4 * 1.0 + 0.1)
    assert shared.stages[0].later_seconds == 0.0, "nobody waits for it"


def sized(prospect: Prospect, peaks: list[int]) -> Prospect:
    """Nodes that hold 100 bytes each, and take so much for a moment."""
    none = dict.fromkeys(["optimizer_bytes", "buffer_bytes", "activation_bytes", "boundary_bytes"], 0)
    nodes = tuple(
        replace(node, parameter_bytes=50, forward_peak_bytes=0, backward_peak_bytes=peak, **none)
        for node, peak in zip(prospect.profile.nodes, peaks, strict=True)
    )
    return replace(prospect, profile=replace(prospect.profile, nodes=nodes, value_bytes={}))


@pytest.mark.parametrize("placer", ["m-topo", "m-etf", "m-sct", "fused", "balanced"])
def test_a_placement_whose_peaks_do_not_fit_is_made_again_with_less_room(placer: str, tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    prospect = sized(even_chain(tmp_path), [250, *[0] * LAYERS])
    found = lay_out(prospect, 2, [600, 600], 2, "1f1b", placer, lambda size: 0.0)
    (first,) = [stage for stage in found.stages if stage.device == found.stages[0].device]
    assert 1 <= len(first.nodes) <= 3, "350 bytes are left beside what the first layer takes for a moment"
    hard = sized(prospect, [550, *[0] * LAYERS])
    with pytest.raises(PlacementInfeasible, match=r"lack \d+ B on a device") as raised:
        lay_out(hard, 2, [600, 600], 2, "1f1b", placer, lambda size: 0.0)
    lacking = int(raised.value.lacking_bytes)
    assert 150 <= lacking <= 550, "150 would do, for two nodes beside seven"
    lay_out(hard, 2, [600 + lacking] * 2, 2, "1f1b", placer, lambda size: 0.0)


def test_evaluation_counts_where_there_is_one(tmp_path: Path) -> None:
    torch.manual_seed(SEED)
    prospect = even_chain(tmp_path)
    plain, judged, wide = (
        lay_out(replace(prospect, **fields), 2, [1 << 30] * 2, 4, "1f1b", "balanced", lambda size: 0.0).stages
        for fields in ({}, {"judged_batches": 1000.0}, {"metric_bytes": 1 << 20})
    )
    without = most_on_a_device(plain, 2, "1f1b", 4)
    assert {stage.judged_bytes for stage in plain} == {0}
    assert most_on_a_device(judged, 2, "1f1b", 4) > 1000 * 5 * 6 * 8 > without, "a thousand times five rows of six"
    assert [stage.judged_bytes for stage in wide] == [0, 1 << 20], "loss and metrics are where the loss is"


def test_what_lacks_is_what_each_device_would_have_to_have_more() -> None:
    """Of k small atoms the first device holds 100 k + 10; the second holds 90 (5 - k) + 300, with the large one."""
    chain = Chain([1.0] * 6, [80.0] * 5 + [280.0], [10.0] * 6, [10.0] * 6, range(6))
    waiting = [2, 1]
    assert chain.balanced(waiting, [480, 480]) == [0, 0, 0, 1, 1, 1], "even times"
    assert chain.balanced(waiting, [410, 410]) == [0, 0, 0, 0, 1, 1], "what fits"
    assert chain.balanced(waiting, [409, 409]) is None
    assert chain.lacking(waiting, [300, 300]) == 110
