"""Units of a study over time, as sums or for a time range, without reading all of them.

A long search has millions of units. `Work` keeps sums that each refresh extends; a time range returns the units
themselves if they are few, else bins that the database sums up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Connection, Integer, and_, cast, func, select

from hydra_tune.storage.tables import HYDRA_SPILLED, HYDRA_UNITS

BUILDER = "builder"
"""Device name recorded for units of the worker without a device."""
_U = HYDRA_UNITS.c


@dataclass
class Work:
    """Sums over all units of a study so far."""

    study_id: int
    last_unit: int = 0
    units: int = 0
    first: float = float("inf")
    last: float = 0.0
    longest: float = 0.0
    """Seconds of the longest unit: how long before a time range a unit that reaches into it may have begun."""
    by_device: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_trial: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds on devices."""
    device_first: float = float("inf")
    device_last: float = 0.0

    def refresh(self, connection: Connection) -> None:
        """Add the units recorded since the last refresh."""
        last = connection.execute(select(func.max(_U.unit_id)).where(_U.study_id == self.study_id)).scalar()
        if last is None or last == self.last_unit:
            return
        new = and_(_U.study_id == self.study_id, _U.unit_id > self.last_unit, _U.unit_id <= last)
        sums = (
            func.sum(_U.seconds), func.max(_U.seconds), func.min(_U.started), func.max(_U.started + _U.seconds),
            func.count(),
        )  # fmt: skip
        query = select(_U.number, _U.device, *sums).where(new).group_by(_U.number, _U.device)
        for number, device, seconds, longest, first, ended, count in connection.execute(query):
            self.units += count
            self.longest = max(self.longest, longest)
            self.first, self.last = min(self.first, first), max(self.last, ended)
            if device and device != BUILDER:
                self.by_device[device] += seconds
                self.by_trial[number] += seconds
                self.device_first, self.device_last = min(self.device_first, first), max(self.device_last, ended)
        self.last_unit = last


@dataclass
class SpillLog:
    """Size of the spill store over time: bytes in host memory and on disk from each moment until the next."""

    study_id: int
    moments: list[float] = field(default_factory=list)
    host: list[int] = field(default_factory=list)
    disk: list[int] = field(default_factory=list)
    peak: int = 0
    """Peak bytes of host memory and disk together."""

    def refresh(self, connection: Connection) -> None:
        """Read the rows added since the last refresh."""
        table = HYDRA_SPILLED.c
        query = select(table.sampled, table.host_bytes, table.disk_bytes).where(table.study_id == self.study_id)
        if self.moments:
            query = query.where(table.sampled > self.moments[-1])
        for moment, host, disk in connection.execute(query.order_by(table.sampled)):
            self.moments.append(moment)
            self.host.append(host)
            self.disk.append(disk)
            self.peak = max(self.peak, host + disk)

    def most_in_bins(self, start: float, end: float, bins: int) -> tuple[list[int | None], list[int | None]]:
        """Return the peak bytes in host memory and on disk per time bin; None before the first record."""
        width = (end - start) / bins
        host: list[int | None] = []
        disk: list[int | None] = []
        for i in range(bins):
            # The last value before the bin holds at its start.
            first = max(bisect_right(self.moments, start + i * width) - 1, 0)
            last = bisect_left(self.moments, start + (i + 1) * width)
            host.append(max(self.host[first:last], default=None))
            disk.append(max(self.disk[first:last], default=None))
        return host, disk


@dataclass(frozen=True)
class UnitSpan:
    """One unit on the time axis."""

    unit_id: int
    number: int
    kind: str
    device: str
    started: float
    seconds: float
    shard: int | None
    steps: int | None
    peak_bytes: int | None
    read_bytes: int | None
    written_bytes: int | None


@dataclass(frozen=True)
class BusyBin:
    """Totals of the units that a device began for one trial within one time bin."""

    device: str
    bin: int
    number: int
    seconds: float
    peak_bytes: int | None
    read_bytes: int
    written_bytes: int


def units_between(
    connection: Connection, work: Work, start: float, end: float, *, limit: int, after: int = 0
) -> list[UnitSpan] | None:
    """Return the units within the time range and newer than unit `after`; None if more than `limit`."""
    wanted = _within(work, start, end)
    if after:
        wanted = and_(wanted, _U.unit_id > after)
    columns = [_U[name] for name in UnitSpan.__dataclass_fields__]
    rows = connection.execute(select(*columns).where(wanted).order_by(_U.started).limit(limit + 1)).all()
    return None if len(rows) > limit else [UnitSpan(**_named(row)) for row in rows]


def busy_bins(connection: Connection, work: Work, start: float, end: float, bins: int) -> list[BusyBin]:
    """Return the totals of a time range in `bins` bins of equal length."""
    width = (end - start) / bins
    # Units that began before the range count in its first bin. SQLite truncates in a cast, PostgreSQL rounds.
    share = (_U.started - start) / width
    place = cast(func.floor(share) if connection.dialect.name != "sqlite" else share, Integer)
    sums = (
        func.sum(_U.seconds).label("seconds"), func.max(_U.peak_bytes).label("peak_bytes"),
        # PostgreSQL returns sums of large integers as decimals.
        cast(func.coalesce(func.sum(_U.read_bytes), 0), BigInteger).label("read_bytes"),
        cast(func.coalesce(func.sum(_U.written_bytes), 0), BigInteger).label("written_bytes"),
    )  # fmt: skip
    query = select(_U.device, place.label("bin"), _U.number, *sums).where(_within(work, start, end))
    rows = connection.execute(query.group_by(_U.device, place, _U.number))
    return [BusyBin(**{**_named(row), "bin": min(max(row.bin, 0), bins - 1)}) for row in rows]


def _within(work: Work, start: float, end: float) -> ColumnElement[bool]:
    began = _U.started.between(start - work.longest, end)
    return and_(_U.study_id == work.study_id, began, _U.started + _U.seconds >= start)


def _named(row: Any) -> dict[str, Any]:
    named = dict(row._mapping)
    named["device"] = named["device"] or ""
    return named
