"""Shared by all benchmarks: arguments, repeated interleaved rounds, and the table and JSON at the end."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from typing import Any


def arguments(description: str) -> argparse.Namespace:
    """Parse `--quick` for a short run and `--rounds` for the number of measurements of each system."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a short run, to see that it works")
    parser.add_argument("--rounds", type=int, default=None, help="how often each system is measured")
    return parser.parse_args()


def interleaved(systems: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Measure each system once a round, so that a slow minute of the machine falls on all of them."""
    measured: dict[str, list[float]] = {name: [] for name in systems}
    for round_ in range(rounds):
        # Every other round backwards, so that no system always goes first.
        order = list(systems) if round_ % 2 == 0 else list(reversed(systems))
        for name in order:
            measured[name].append(systems[name]())
            print(f"round {round_ + 1}/{rounds}: {name} {measured[name][-1]:.3f}", file=sys.stderr, flush=True)
    return measured


def spread(values: list[float]) -> str:
    """Format the median, minimum and maximum."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def ratios(slow: list[float], fast: list[float]) -> list[float]:
    """Return the speed-up of each round."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def finish(rows: list[tuple[str, str]], document: dict[str, Any]) -> None:
    """Print the table, and the JSON object as the last line."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    print(json.dumps(document))
