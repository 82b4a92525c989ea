"""Limits of a search on a cluster: as many trials at once as its nodes keep busy, each for itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hydra_tune.coordinator.failures import Failures
from hydra_tune.coordinator.limits import Limits
from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.strategies.base import Strategy


class ClusterLimits(Limits):
    """Limits that follow the nodes that join and leave."""

    def __init__(
        self,
        settings: SearchSettings,
        strategy: Strategy,
        failures: Failures,
        devices_of_nodes: Callable[[], Sequence[int]],
    ) -> None:
        """`devices_of_nodes` returns the number of devices of each node that takes trials."""
        super().__init__(settings, strategy, 0, failures)
        self._devices_of_nodes = devices_of_nodes

    @property
    def devices(self) -> int:
        return sum(self._devices_of_nodes())

    @property
    def at_once(self) -> int:
        if self._settings.concurrency is not None:
            return self._settings.concurrency
        return sum(map(self.on_node, self._devices_of_nodes()))

    def on_node(self, devices: int) -> int:
        """Return how many trials run at once on a node with so many devices."""
        if self._settings.concurrency is not None:
            every = max(1, self.devices)
            return max(1, -(-self._settings.concurrency * devices // every))
        return self.at_once_on(devices)
