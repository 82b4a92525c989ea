"""Runs the scheduler on a virtual clock: simulates a policy for many trials on many devices.

It uses the same `ReadyUnits` as the engine, with units of the same shape: some steps of one trial, at most about a
second. Each trial in flight has one unit at a time, which any device may take; when a trial ends, the next begins. A
trial's state stays on the device where it last ran until other trials need the memory there; a device that takes up a
trial without its state waits for the state.
"""

from __future__ import annotations

import itertools
from collections import deque
from heapq import heappop, heappush

from hydra_tune.engine.scenario import Ran, Scenario, ScenarioOutcome
from hydra_tune.engine.scheduler import Ready, ReadyUnits, WorkerView, tuned
from hydra_tune.engine.unit import Role


def simulate(scenario: Scenario, trace: list[Ran] | None = None) -> ScenarioOutcome:
    """Run the scenario to its end; append every unit to `trace` if given."""
    return _Simulation(scenario, trace).run()


class _Simulation:
    """Simulation state between events; an event is the end of a unit. Trials and devices are numbers."""

    def __init__(self, scenario: Scenario, trace: list[Ran] | None) -> None:
        trials, devices = scenario.trials, scenario.devices
        self.scenario, self.trace = scenario, trace
        self.lengths = scenario.lengths()
        policy = tuned(scenario.policy, slack=scenario.slack, seed=scenario.seed)
        self.ready, self.slots = ReadyUnits(policy), policy.slots
        self.to_come = iter(range(trials))
        self.done = [0] * trials
        """Units of each trial that have ended."""
        self.home: list[int | None] = [None] * trials
        self.last_turn = [-1] * trials
        self.given: list[deque[int]] = [deque() for _ in range(devices)]
        """Trials of the units that each device has; the first one runs."""
        self.by_load = [set(range(devices)), *(set[int]() for _ in range(self.slots))]
        """Devices by number of units."""
        self.current: list[int | None] = [None] * devices
        """Trial of the last unit handed to each device."""
        self.ran: list[int | None] = [None] * devices
        """Trial of the last unit begun on each device."""
        self.inside: list[dict[int, None]] = [{} for _ in range(devices)]
        """Trials whose latest state each device has, least recently used first."""
        self.events: list[tuple[float, int, int]] = []
        self.count = itertools.count()
        self.busy, self.same, self.switches, self.moved = 0.0, 0, 0, 0

    def run(self) -> ScenarioOutcome:
        in_flight = self.scenario.concurrency or self.scenario.devices + 1
        for trial in itertools.islice(self.to_come, in_flight):
            self.make_ready(trial)
        now = 0.0
        self.hand_out(now)
        while self.events:
            now = self.events[0][0]
            ended = []
            while self.events and self.events[0][0] == now:  # units that end at the same time are dispatched together
                ended.append(self.end(now, heappop(self.events)[2]))
            if self.slots > 1:
                self.hand_out(now)  # like the engine, which does not wait for the trials' next units then
            for trial in ended:
                if self.done[trial] < self.lengths[trial][0]:
                    self.make_ready(trial)
                else:
                    self.replace(trial)
            self.hand_out(now)
        return self.outcome(now)

    def make_ready(self, trial: int) -> None:
        """Offer the trial's next unit to the scheduler."""
        units, seconds = self.lengths[trial]
        left = (units - self.done[trial]) * seconds
        self.ready.add(
            Ready(
                trial, trial, str(trial), home=self.home[trial], remaining=left, arrival=next(self.count),
                last_turn=self.last_turn[trial],
            )
        )  # fmt: skip

    def replace(self, ended: int) -> None:
        """Drop an ended trial's state and begin the next trial."""
        home = self.home[ended]
        assert home is not None
        self.inside[home].pop(ended, None)
        for trial in itertools.islice(self.to_come, 1):
            self.make_ready(trial)

    def hand_out(self, now: float) -> None:
        """Fill running slots first, then next slots, in device order like the engine."""
        for load in range(self.slots):
            while self.by_load[load] and len(self.ready):
                device = min(self.by_load[load])
                current = self.current[device]
                unit = self.ready.take(WorkerView(device, Role.DEVICE, None if current is None else str(current)))
                assert unit is not None, "any device may run any unit"
                self.given[device].append(unit.trial)
                self.note_load(device, load)
                self.current[device], self.last_turn[unit.trial] = unit.trial, next(self.count)
                if load == 0:
                    self.begin(now, device)

    def note_load(self, device: int, before: int) -> None:
        """Update `by_load` for a device that had `before` units."""
        self.by_load[before].remove(device)
        self.by_load[len(self.given[device])].add(device)

    def begin(self, now: float, device: int) -> None:
        """Start the first unit that the device was given."""
        trial = self.given[device][0]
        seconds = self.lengths[trial][1]
        begins = now + self.bring(device, trial)
        heappush(self.events, (begins + seconds, next(self.count), device))
        self.busy += seconds
        self.same += self.ran[device] == trial
        self.switches += self.ran[device] not in (None, trial)
        self.ran[device] = trial
        if self.trace is not None:
            self.trace.append(Ran(trial, self.done[trial], device, now, begins, begins + seconds))

    def bring(self, device: int, trial: int) -> float:
        """Move the trial's state to the device; return the seconds for writing and reading it."""
        scenario, inside, home = self.scenario, self.inside[device], self.home[trial]
        self.home[trial] = device
        if not scenario.state_bytes:
            return 0.0
        if trial in inside:
            del inside[trial]  # reinsert as the most recently used
            inside[trial] = None
            return 0.0
        if home is not None:
            self.inside[home].pop(trial, None)
        while scenario.device_memory is not None and len(inside) >= scenario.device_memory // scenario.state_bytes:
            del inside[next(iter(inside))]
        inside[trial] = None
        moved = scenario.state_bytes * (1 if home is None else 2)
        self.moved += moved
        return moved / scenario.bandwidth

    def end(self, now: float, device: int) -> int:
        """End the device's running unit, begin its next one if any, and return the trial that ran."""
        load, trial = len(self.given[device]), self.given[device].popleft()
        self.note_load(device, load)
        self.done[trial] += 1
        if self.given[device]:
            self.begin(now, device)
        return trial

    def outcome(self, makespan: float) -> ScenarioOutcome:
        devices, units = self.scenario.devices, sum(count for count, _ in self.lengths)
        work = [count * seconds for count, seconds in self.lengths]
        bound = max(*work, sum(work) / devices)
        return ScenarioOutcome(
            units=units, makespan=makespan, lower_bound=bound, makespan_vs_bound=makespan / bound,
            utilization=self.busy / (devices * makespan), same_model_residency=self.same / units,
            switches=self.switches, moved_bytes=self.moved,
        )  # fmt: skip
