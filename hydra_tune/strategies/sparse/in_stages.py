"""A pruned candidate in pipeline stages: each device has the compressed state of its own part of the network.

Differs from `pipeline` in the storage of parameters (`sparse.stage_parameters`) and in the number of devices: as few as
have the memory, since the memory freed by pruning would otherwise lie idle.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra_tune.engine.remote import remote
from hydra_tune.strategies.base import TrialRun
from hydra_tune.strategies.epochs import InTraining
from hydra_tune.strategies.pipeline.strategy import InStages
from hydra_tune.strategies.sparse.pruned_trial import ORDER, PrunedStaged, StagingRequest
from hydra_tune.strategies.sparse.ticket import in_builder, train_pruned
from hydra_tune.training.progress import Progress

if TYPE_CHECKING:
    from hydra_tune.strategies.sparse import builder_units as units
    from hydra_tune.strategies.sparse import stage_units as stage_units
    from hydra_tune.strategies.sparse.strategy import Sparse
else:
    units = remote("hydra_tune.strategies.sparse.builder_units")
    stage_units = remote("hydra_tune.strategies.sparse.stage_units")


async def train_in_stages(run: TrialRun, strategy: Sparse) -> None:
    """Train a candidate to its last epoch, in stages on the devices it needs."""
    builder = run.candidacy.worker
    assert builder is not None
    with ExitStack() as stack:

        async def prune() -> InTraining:
            laid: PrunedStaged = await in_builder(run, "lay out", units.stage)
            devices = stack.enter_context(strategy.occupancy.taken(laid.devices, len(run.engine.devices)))
            workers = run.engine.workers_of_all_devices()
            found = PrunedInStages(
                run, laid.staged, ORDER, devices, [workers[device] for device in devices], builder, laid=laid,
                strategy=strategy,
            )  # fmt: skip
            await found.bring_in()
            stack.callback(found.note_plan)
            return found

        await train_pruned(run, strategy, _wanted(run, strategy), prune)


def _wanted(run: TrialRun, strategy: Sparse) -> StagingRequest:
    """Return the options, with each device's room: all of it, unless there are more trials than devices."""
    devices = len(run.engine.devices)
    stages = strategy.stages if isinstance(strategy.stages, int) else None
    sharing = -(-run.at_once * (stages or devices) // devices)
    room = min(device.memory for device in run.engine.devices) // max(1, sharing)
    return StagingRequest(stages, strategy.microbatches, devices, room)


@dataclass
class PrunedInStages(InStages):
    """A pruned candidate on some of the devices."""

    laid: PrunedStaged | None = None
    strategy: Sparse | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._state_bytes: list[int] = []
        """Bytes of state on each device, known once a step has created the optimizer's state."""

    async def train(self, remaining: float | None) -> Progress:
        progress = await super().train(remaining)
        if not self._state_bytes:
            found = await self.everywhere("account", stage_units.state_bytes, recorded=False)
            self._state_bytes = [result.value for result in found]
            self.note_plan()
        return progress

    def note_plan(self) -> None:
        assert self.laid is not None
        assert self.strategy is not None
        laid, remains = self.laid, self.laid.remains
        plan: dict[str, Any] = {
            "phase": "sparse", "way": "stages", "mask": self.strategy.mask, "precision": self.strategy.precision,
            "pruned_weights": remains.pruned, "survivors": remains.survivors, "devices": laid.devices,
            "needed_stages": laid.needed, "dense_stages": laid.dense_needed, "state_bytes": self._state_bytes,
            **self.plan(),
        }  # fmt: skip
        self.run.planned("sparse", laid.devices, plan=plan)
