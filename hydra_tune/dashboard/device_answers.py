"""Devices and their units, as response models."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import Connection

from hydra_tune.coordinator.makespan import Makespan
from hydra_tune.dashboard import answers
from hydra_tune.dashboard.charts import busy_shares
from hydra_tune.dashboard.reader import StudyView
from hydra_tune.storage.timeline import BUILDER, BusyBin, UnitSpan, busy_bins, units_between
from hydra_tune.strategies.registry import find_strategy

MOST_UNITS = 4_000
"""Maximum number of units sent singly; more are summed up in bins, since a screen cannot show them."""


def _spans(strategy: str) -> bool:
    """True if a trial of this strategy can be on several devices at once, or the strategy is unknown."""
    kind = find_strategy(strategy)
    return kind is None or kind.spans_devices


def devices(view: StudyView) -> answers.Devices:
    """Return the devices, their utilisation, and the makespan compared to its lower bound."""
    work = view.work
    names = sorted({*view.pool, *work.by_device})
    ran = max(0.0, work.device_last - work.device_first) if work.by_device else 0.0
    spans = any(_spans(name) for name in set(view.columns.words("strategy")) if name)
    spread = set(work.by_trial) if spans else set[int]()
    makespan = Makespan(max(1, len(names)), work=dict(work.by_trial), spread=spread)
    total = sum(work.by_device.values())
    longest = makespan.longest >= total / max(1, len(names))
    return answers.Devices(
        devices=[
            answers.DeviceRow(
                name=name, seconds=work.by_device.get(name, 0.0),
                utilisation=min(1.0, work.by_device.get(name, 0.0) / ran) if ran else 0.0,
                budget_bytes=view.pool.get(name),
            )
            for name in names
        ],
        start=work.first if work.units else None,
        end=work.last if work.units else None,
        units=work.units,
        last_unit=work.last_unit,
        makespan=ran,
        bound=makespan.bound,
        bound_reason="the longest trial" if longest else f"all work spread over {len(names)} devices",
        utilisation=min(1.0, total / (ran * len(names))) if ran and names else 0.0,
        spilled_bytes=view.spilled.peak if view.spilled.moments else None,
    )  # fmt: skip


def timeline(
    connection: Connection, view: StudyView, start: float | None, end: float | None, bins: int
) -> answers.Timeline:
    """Return a stretch of time, by default all of it."""
    work = view.work
    first, last = (work.first, work.last) if work.units else (0.0, 1.0)
    start, end = first if start is None else start, last if end is None else end
    end = max(end, start + 1e-3)
    units = units_between(connection, work, start, end, limit=MOST_UNITS)
    if units is not None:
        rows, series = [_unit(unit) for unit in units], _series_of_units(units, start, end, bins)
    else:
        binned = busy_bins(connection, work, start, end, bins)
        rows, series = _busiest(binned, start, end, bins), _series_of_bins(binned, start, end, bins)
    host, disk = view.spilled.most_in_bins(start, end, bins)
    return answers.Timeline(
        start=start, end=end, bins=bins, exact=units is not None, last_unit=work.last_unit, units=rows,
        series=[row for row in series if row.device != BUILDER],
        spilled=answers.SpillSeries(host_bytes=host, disk_bytes=disk),
    )  # fmt: skip


def new_units(connection: Connection, view: StudyView, after: int) -> list[answers.UnitRow] | None:
    """Return the units that ended after unit `after`; None if they are too many to send."""
    found = units_between(connection, view.work, view.work.first, view.work.last, limit=MOST_UNITS // 4, after=after)
    return None if found is None else [_unit(unit) for unit in found]


def _unit(unit: UnitSpan) -> answers.UnitRow:
    facts = dict(vars(unit))
    del facts["unit_id"]
    return answers.UnitRow(**facts)


def _series_of_units(units: Sequence[UnitSpan], start: float, end: float, bins: int) -> list[answers.DeviceSeries]:
    width = (end - start) / bins
    by_device: defaultdict[str, list[UnitSpan]] = defaultdict(list)
    for unit in units:
        by_device[unit.device].append(unit)
    series = []
    for device, mine in sorted(by_device.items()):
        resident: list[int | None] = [None] * bins
        read, written = [0] * bins, [0] * bins
        for unit in mine:
            first = min(max(int((unit.started - start) / width), 0), bins - 1)
            last = min(max(int((unit.started + unit.seconds - start) / width), first), bins - 1)
            for i in range(first, last + 1):
                if unit.peak_bytes is not None:
                    resident[i] = max(resident[i] or 0, unit.peak_bytes)
            read[first] += unit.read_bytes or 0
            written[first] += unit.written_bytes or 0
        busy = busy_shares(((unit.started, unit.seconds) for unit in mine), start, end, bins)
        moved = {"read_bytes": read, "written_bytes": written}
        series.append(answers.DeviceSeries(device=device, busy=busy, resident_bytes=resident, **moved))
    return series


def _series_of_bins(binned: Sequence[BusyBin], start: float, end: float, bins: int) -> list[answers.DeviceSeries]:
    """Return the series of bins; a bin's work counts from its start, and longer work extends into the next bins."""
    width = (end - start) / bins
    as_units = [
        UnitSpan(0, one.number, "", one.device, start + one.bin * width, one.seconds, None, None, one.peak_bytes,
                 one.read_bytes, one.written_bytes)
        for one in binned
    ]  # fmt: skip
    return _series_of_units(as_units, start, end, bins)


def _busiest(binned: Sequence[BusyBin], start: float, end: float, bins: int) -> list[answers.UnitRow]:
    """Return, for each device and bin, the trial that did most in it."""
    width = (end - start) / bins
    best: dict[tuple[str, int], BusyBin] = {}
    busy: defaultdict[tuple[str, int], float] = defaultdict(float)
    for one in binned:
        key = (one.device, one.bin)
        busy[key] += one.seconds
        if key not in best or one.seconds > best[key].seconds:
            best[key] = one
    return [
        answers.UnitRow(
            device=one.device,
            number=one.number,
            kind="",
            started=start + one.bin * width,
            seconds=min(width, busy[one.device, one.bin]),
            peak_bytes=one.peak_bytes,
            read_bytes=one.read_bytes,
            written_bytes=one.written_bytes,
        )
        for one in best.values()
    ]
