"""Simulate searches on a virtual clock: the real coordinator, engine, scheduler, strategies and study thread.

Workers are simulated: they are slow, die, hang, and lose messages as a seed says. The database goes away, the search is
interrupted and resumed, the coordinator does not run for a while. Each schedule must come to its end, with each trial
ended once, and with the values and weights of a search without faults.

    python -m benchmarks.schedules --count 1000          seeds 0 to 999
    python -m benchmarks.schedules --seed 123 --verbose  one schedule again, with its log
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

from benchmarks.report import finish
from benchmarks.simulation.schedule import Schedule, run_schedule, same_engines
from hydra_tune.storage import open_storage


def main() -> None:
    """Run schedules."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=1000, help="how many schedules")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--verbose", action="store_true", help="show the coordinator's log")
    parser.add_argument("--quick", action="store_true", help="twenty schedules")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    seeds = range(options.first, options.first + (20 if options.quick else options.count))
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    statuses, failing, faults, runs, virtual = Counter[str](), [], 0, 0, 0.0
    began = time.monotonic()
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name, same_engines():
        place = Path(name)
        open_storage(f"sqlite:///{place}/empty.db").close()
        for seed in seeds:
            schedule = Schedule.of(seed)
            found = run_schedule(schedule, place, place / "empty.db")
            statuses += found.statuses
            faults, runs, virtual = faults + found.faults, runs + found.runs, virtual + found.seconds
            if found.wrong:
                failing.append(seed)
                print(f"seed {seed}: {'; '.join(found.wrong[:5])}", flush=True)
            if options.verbose:
                print(schedule, found)
    seconds = time.monotonic() - began
    document = {
        "schedules": len(seeds), "failing": len(failing), "faults": faults, "runs": runs, "trials": statuses.total(),
        "virtual_hours": round(virtual / 3600, 2), "seconds": round(seconds, 1),
        "schedules_a_minute": round(60 * len(seeds) / seconds), "failing_seeds": failing[:20],
        "statuses": dict(statuses),
    }  # fmt: skip
    finish([(name, str(value)) for name, value in document.items()], document)
    raise SystemExit(bool(failing))


if __name__ == "__main__":
    main()
