"""Display of a running search: a live view on a terminal, plain lines when piped, nothing if not wanted.

Everything goes to stderr; stdout is left to results. `SearchView` holds the data; the displays only draw it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra_tune.coordinator.settings import SearchSettings
from hydra_tune.core.devices import Device, format_bytes
from hydra_tune.core.errors import printable, shortened
from hydra_tune.core.states import Outcome, Status
from hydra_tune.engine.unit import Role, Unit, UnitResult
from hydra_tune.storage.database import masked
from hydra_tune.training.builds import Blueprint
from hydra_tune.training.progress import Progress

LONGEST_SHOWN = 600
"""Characters of a trial's error on its line; the database has more."""

MOST_ROWS = 16
"""Devices that are shown one by one; of more, a row for each node is shown."""


@dataclass
class DeviceRow:
    """Current work of one device."""

    trial: int | None = None
    kind: str = ""
    members: int = 1
    """Trials that train as one."""

    @property
    def doing(self) -> str:
        together = f", {self.members} trials as one" if self.members > 1 else ""
        return f"{self.kind}{together}" if self.kind else "waiting"


@dataclass
class TrialRow:
    """Progress of a running trial."""

    started: float = field(default_factory=time.monotonic)
    epoch: int = 0
    epochs: int = 0
    fraction: float = 0.0
    batches_per_second: float = 0.0
    loss: float | None = None
    peak_bytes: int | None = None


@dataclass
class SearchView:
    """The state of a running search, for displays."""

    settings: SearchSettings
    devices: dict[str, DeviceRow]
    trials: dict[int, TrialRow] = field(default_factory=dict)
    ended: Counter[Status] = field(default_factory=Counter)
    before: int = 0
    """Trials that had ended before this run."""
    best: tuple[float, int] | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def finished(self) -> int:
        return self.before + self.ended.total()

    def seconds_left(self) -> float | None:
        """Return the seconds until the budget is used up at the current pace, or until the timeout."""
        if self.settings.endless and self.settings.timeout is not None:
            return max(0.0, self.started + self.settings.timeout - time.monotonic())
        here = self.ended.total()
        if not here or self.settings.endless:
            return None
        pace = (time.monotonic() - self.started) / (here + sum(row.fraction for row in self.trials.values()))
        left = self.settings.trials - self.finished - sum(row.fraction for row in self.trials.values())
        return max(0.0, pace * left)

    def share_done(self) -> float:
        """Return the share of the budget used, in trials or in time."""
        if self.settings.endless and self.settings.timeout is None:
            return 0.0
        if self.settings.endless and self.settings.timeout is not None:
            return min(1.0, (time.monotonic() - self.started) / self.settings.timeout)
        return (self.finished + sum(row.fraction for row in self.trials.values())) / self.settings.trials

    def note_value(self, number: int, outcome: Outcome) -> None:
        if outcome.status is not Status.COMPLETE or not outcome.values or len(outcome.values) > 1:
            return
        value = outcome.values[0]
        maximize = self.settings.directions[0] == "maximize"
        rank = (-value if maximize else value, number)
        if self.best is None or rank < (-self.best[0] if maximize else self.best[0], self.best[1]):
            self.best = (value, number)

    def summary(self) -> str:
        counts = ", ".join(f"{count} {status.lower().replace('_', ' ')}" for status, count in self.ended.items())
        return counts or "none ended yet"


class Display:
    """Follows a search and shows nothing; base of the displays below."""

    def __init__(self, settings: SearchSettings, devices: tuple[Device, ...]) -> None:
        self.settings = settings
        self.view = SearchView(settings, {device.name: DeviceRow() for device in devices})

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def restore_terminal(self) -> None:
        """Restore the terminal at once: the process is about to end."""

    def set_settings(self, settings: SearchSettings) -> None:
        """Continue with other settings, such as more trials."""
        self.settings = self.view.settings = settings

    def set_devices(self, names: Iterable[str]) -> None:
        """Go on with other devices, as nodes of a cluster have joined or left."""
        self.view.devices = {name: self.view.devices.get(name, DeviceRow()) for name in names}

    def show(self, text: str) -> None:
        """Show a line from elsewhere: a worker's print, a traceback, a warning."""

    def search_started(self, study_id: int, finished: int) -> None:
        self.view.before, self.view.started = finished, time.monotonic()

    def trial_started(self, number: int) -> None:
        self.view.trials[number] = TrialRow()

    def trial_progress(self, number: int, blueprint: Blueprint, progress: Progress) -> None:
        row = self.view.trials[number]
        row.epoch, row.epochs = progress.epoch + 1, blueprint.epochs
        row.fraction = (progress.epoch + progress.batch / progress.batches) / blueprint.epochs
        row.batches_per_second = progress.batches_done / max(progress.seconds, 1e-9)
        row.loss = progress.loss

    def unit_started(self, unit: Unit, device: str) -> None:
        if unit.role is Role.DEVICE:
            self.view.devices[device] = DeviceRow(unit.trial, unit.kind, len(unit.members) or 1)

    def unit_ended(self, unit: Unit, result: UnitResult) -> None:
        if unit.role is Role.DEVICE and result.device in self.view.devices:
            self.view.devices[result.device].kind = ""
        row = self.view.trials.get(unit.trial)
        if row is not None and result.peak_bytes:
            row.peak_bytes = max(row.peak_bytes or 0, result.peak_bytes)

    def trial_ended(self, number: int, outcome: Outcome) -> None:
        self.view.trials.pop(number, None)
        self.view.ended[outcome.status] += 1
        self.view.note_value(number, outcome)


class PlainDisplay(Display):
    """One line for each state change, for logs and pipes."""

    def show(self, text: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # whoever read it is gone; the search goes on
            print(printable(text), file=sys.stderr, flush=True)

    def search_started(self, study_id: int, finished: int) -> None:
        super().search_started(study_id, finished)
        done = f", {finished} of them done" if finished else ""
        self.show(
            f"study {self.settings.study}: {self._budget()}{done}, on {place_of(self.view.devices)}, "
            f"in {masked(self.settings.storage)}"
        )

    def trial_ended(self, number: int, outcome: Outcome) -> None:
        row = self.view.trials.get(number, TrialRow())
        super().trial_ended(number, outcome)
        self.show(f"{self._progress()} trial {number} {self._what(outcome)} in {time.monotonic() - row.started:.1f} s")

    def _budget(self) -> str:
        if self.settings.endless and self.settings.timeout is not None:
            return f"{duration(self.settings.timeout)} of trials"
        if self.settings.endless:
            return "trials until it is stopped"
        return f"{self.settings.trials} trials"

    def _progress(self) -> str:
        if self.settings.endless:
            return f"[{self.view.finished}]"
        width = len(str(self.settings.trials))
        return f"[{self.view.finished:{width}}/{self.settings.trials}]"

    def _what(self, outcome: Outcome) -> str:
        text = str(outcome.status)
        if outcome.values and outcome.status is Status.COMPLETE:
            text += " " + " ".join(f"{m}={v:.6g}" for m, v in zip(self.settings.metrics, outcome.values, strict=True))
        if outcome.error:
            text += f" ({shortened(' '.join(outcome.error.split()), LONGEST_SHOWN)})"
        return text


class LiveDisplay(Display):
    """A live view, redrawn a few times a second: overall bar, one line per device, the best trial."""

    def __init__(self, settings: SearchSettings, devices: tuple[Device, ...]) -> None:
        super().__init__(settings, devices)
        from rich.console import Console
        from rich.live import Live

        self._console = Console(stderr=True, highlight=False)
        self._live = Live(
            get_renderable=self._draw, console=self._console, refresh_per_second=4, redirect_stdout=False,
            redirect_stderr=False,
        )  # fmt: skip

    def __enter__(self) -> Display:
        self._live.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._live.stop()

    def restore_terminal(self) -> None:
        self._console.show_cursor(True)

    def show(self, text: str) -> None:
        from rich.text import Text

        self._console.print(Text(printable(text)))

    def _draw(self) -> Any:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        view = self.view
        left = view.seconds_left()
        eta = f", about {duration(left)} left" if left is not None and view.finished < self.settings.trials else ""
        total = "" if self.settings.endless else f"/{self.settings.trials}"
        head = Text.assemble(
            ("study ", "dim"), (self.settings.study, "bold"),
            f"  {view.finished}{total} trials, {duration(time.monotonic() - view.started)}{eta}",
            (f"  ({view.summary()})", "dim"),
        )  # fmt: skip
        bar = ProgressBar(total=1.0, completed=view.share_done())
        overall = Table.grid()
        overall.add_row(bar)
        table = Table(box=None, pad_edge=False, header_style="dim")
        for column in ("device", "trial", "doing", "epoch", "loss", "batches/s", "memory"):
            table.add_column(column, justify="left" if column in ("device", "doing") else "right")
        for name, device in view.devices.items() if len(view.devices) <= MOST_ROWS else ():
            table.add_row(*self._device_cells(name, device))
        for name, devices in by_node(view.devices).items() if len(view.devices) > MOST_ROWS else ():
            table.add_row(*self._node_cells(name, devices))
        return Group(head, overall, table, self._best())

    def _device_cells(self, name: str, device: DeviceRow) -> list[str]:
        row = self.view.trials.get(device.trial) if device.trial is not None else None
        if row is None:
            return [name, "", "idle"]
        return [
            name, str(device.trial), device.doing,
            f"{row.epoch}/{row.epochs}" if row.epochs else "",
            "" if row.loss is None else f"{row.loss:.4f}",
            f"{row.batches_per_second:.1f}" if row.batches_per_second else "",
            format_bytes(row.peak_bytes) if row.peak_bytes else "",
        ]  # fmt: skip

    def _node_cells(self, name: str, devices: list[DeviceRow]) -> list[str]:
        trials = {device.trial for device in devices if device.trial in self.view.trials}
        busy = sum(bool(device.kind) for device in devices)
        return [name, f"{len(trials)} trials", f"{busy} of {len(devices)} busy"]

    def _best(self) -> Any:
        from rich.text import Text

        if self.view.best is None:
            return Text("no trial has completed yet", style="dim")
        value, number = self.view.best
        return Text.assemble(
            ("best ", "dim"), (f"{self.settings.metrics[0]} {value:.6g}", "bold green"), f"  trial {number}"
        )


def by_node(devices: Mapping[str, DeviceRow]) -> dict[str, list[DeviceRow]]:
    """Return the devices of each node; those of a search on one machine have no node in their names."""
    nodes: dict[str, list[DeviceRow]] = {}
    for name, device in devices.items():
        nodes.setdefault(name.rpartition("/")[0] or name, []).append(device)
    return nodes


def place_of(devices: Mapping[str, DeviceRow]) -> str:
    """Return where a search runs, on one line: its devices, or its nodes with their numbers of devices."""
    nodes = by_node(devices)
    if len(devices) <= MOST_ROWS:
        return ", ".join(devices)
    return f"{len(devices)} devices of {len(nodes)} nodes" if len(nodes) < len(devices) else f"{len(devices)} devices"


def make_display(settings: SearchSettings, devices: tuple[Device, ...]) -> Display:
    """Return the live display on a terminal, else plain lines; a silent one if progress is off."""
    if not settings.progress:
        return Display(settings, devices)
    return (LiveDisplay if sys.stderr.isatty() else PlainDisplay)(settings, devices)


def duration(seconds: float) -> str:
    """Format seconds for people: 45 s, 3 min 20 s, 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
