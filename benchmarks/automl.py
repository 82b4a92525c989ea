"""AutoML side by side: equal time on real tables, judged on rows that no system has seen.

    python -m benchmarks.automl                                  2 minutes, 3 seeds: some 6 hours
    python -m benchmarks.automl --at-once 2                      two fits at a time, each with its share of the cores
    python -m benchmarks.automl --minutes 0.5 --seeds 1          a reduced form
    python -m benchmarks.automl --report                         report the results so far

Each fit runs in a separate process. Results are appended to a file and not computed again, so an interrupted run can
continue. Systems: Hydra Tune; scikit-learn's MLPClassifier and MLPRegressor in a random search; HistGradientBoosting
with its defaults and in a random search; FLAML. A quarter of each table is the test set.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.automl_tables import TABLES
from benchmarks.report import finish

NEURAL = ("hydra", "mlp_search")
Predicted = np.ndarray
System = Callable[[pd.DataFrame, pd.DataFrame, str, str, float, int], Predicted]


def cores() -> int:
    """Return the number of cores that this fit may use, the same for all systems."""
    return len(os.sched_getaffinity(0))


def hydra(train: pd.DataFrame, test: pd.DataFrame, target: str, task: str, seconds: float, seed: int) -> Predicted:
    import hydra_tune as ht

    with tempfile.TemporaryDirectory() as folder:
        predictor = ht.fit(
            train, target, time=seconds, task=task, seed=seed, to=f"{folder}/model", progress=False,
            storage=f"sqlite:///{folder}/study.db",
        )  # fmt: skip
        if task == "regression":
            return predictor.predict(test).to_numpy()
        return predictor.predict_proba(test).to_numpy()


def mlp_search(train: pd.DataFrame, test: pd.DataFrame, target: str, task: str, seconds: float, seed: int) -> Predicted:
    """Search perceptrons at random by cross-validation, then fit the best one on all rows."""
    from sklearn.neural_network import MLPClassifier, MLPRegressor

    random = np.random.default_rng(seed)

    def propose() -> Any:
        kind = MLPRegressor if task == "regression" else MLPClassifier
        return kind(
            hidden_layer_sizes=(int(random.choice([32, 64, 128, 256])),) * int(random.integers(1, 4)),
            alpha=float(10 ** random.uniform(-6, 0)), learning_rate_init=float(10 ** random.uniform(-3.5, -1.5)),
            batch_size=int(random.choice([32, 64, 128])), early_stopping=True, max_iter=200, random_state=seed,
        )  # fmt: skip

    return _searched(propose, train, test, target, task, seconds, scaled=True)


def boosting_search(
    train: pd.DataFrame, test: pd.DataFrame, target: str, task: str, seconds: float, seed: int
) -> Predicted:
    """Search gradient-boosted trees in the same way, starting with their defaults."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    random = np.random.default_rng(seed)
    kind = HistGradientBoostingRegressor if task == "regression" else HistGradientBoostingClassifier
    first = [kind(random_state=seed)]

    def propose() -> Any:
        if first:
            return first.pop()
        return kind(
            learning_rate=float(10 ** random.uniform(-2, -0.5)), max_leaf_nodes=int(random.choice([7, 15, 31, 63])),
            min_samples_leaf=int(random.choice([5, 10, 20, 50])), l2_regularization=float(10 ** random.uniform(-6, 1)),
            max_iter=int(random.choice([50, 100, 200, 400])), random_state=seed,
        )  # fmt: skip

    return _searched(propose, train, test, target, task, seconds, scaled=False)


def flaml(train: pd.DataFrame, test: pd.DataFrame, target: str, task: str, seconds: float, seed: int) -> Predicted:
    from flaml import AutoML

    fitted = AutoML()
    metric = {"binary": "roc_auc", "multiclass": "accuracy", "regression": "rmse"}[task]
    kind = "regression" if task == "regression" else "classification"
    fitted.fit(
        train.drop(columns=target), train[target], task=kind, metric=metric, time_budget=seconds, seed=seed, verbose=0,
        n_jobs=cores(),
    )  # fmt: skip
    rows = test.drop(columns=target)
    return np.asarray(fitted.predict(rows) if task == "regression" else fitted.predict_proba(rows))


def _searched(
    propose: Callable[[], Any], train: pd.DataFrame, test: pd.DataFrame, target: str, task: str, seconds: float,
    *, scaled: bool,
) -> Predicted:  # fmt: skip
    from sklearn.model_selection import KFold, StratifiedKFold, cross_val_score
    from sklearn.pipeline import make_pipeline

    began = time.monotonic()
    rows, wanted = train.drop(columns=target), train[target]
    folds = (
        KFold(5, shuffle=True, random_state=0)
        if task == "regression"
        else StratifiedKFold(5, shuffle=True, random_state=0)
    )
    judged = {"binary": "roc_auc", "multiclass": "accuracy", "regression": "neg_root_mean_squared_error"}[task]
    best: tuple[float, Any] | None = None
    last = 0.0
    # Stop when the next fit, which takes about as long as the last, would exceed the time.
    while best is None or time.monotonic() - began + last < seconds:
        started = time.monotonic()
        model = make_pipeline(_columns(rows, scaled), propose())
        value = float(cross_val_score(model, rows, wanted, cv=folds, scoring=judged, n_jobs=cores()).mean())
        last = time.monotonic() - started
        if best is None or value > best[0]:
            best = (value, model)
    model = best[1].fit(rows, wanted)
    return np.asarray(model.predict(test) if task == "regression" else model.predict_proba(test))


def _columns(rows: pd.DataFrame, scaled: bool) -> Any:
    from sklearn.compose import make_column_selector, make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    if scaled:
        numbers: Any = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
        categories: Any = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    else:
        numbers, categories = "passthrough", OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    return make_column_transformer(
        (numbers, make_column_selector(dtype_include="number")),
        (categories, make_column_selector(dtype_exclude="number")),
    )


SYSTEMS: Mapping[str, System] = {
    "hydra": hydra, "mlp_search": mlp_search, "boosting_search": boosting_search, "flaml": flaml,
}  # fmt: skip


def measure(table: str, system: str, seconds: float, seed: int) -> dict[str, Any]:
    """Run one fit here and score it on the test quarter of the table."""
    from sklearn.model_selection import train_test_split

    from hydra_tune.automl.scores import score_for
    from hydra_tune.automl.target import codes_of, make_target

    warnings.simplefilter("ignore")
    frame, target = TABLES[table]()
    goal = make_target(frame[target], table)
    if goal.labels:
        frame = frame.assign(**{target: goal.values})
    train, test = train_test_split(
        frame, test_size=0.25, random_state=seed, stratify=goal.values if goal.labels else None
    )
    train, test = train.reset_index(drop=True), test.reset_index(drop=True)
    score = score_for(goal.task)
    began = time.monotonic()
    predicted = SYSTEMS[system](train, test.copy(), target, goal.task, seconds, seed)
    taken = time.monotonic() - began
    numbers = tuple(range(len(goal.labels)))
    truth = codes_of(numbers, test[target], table) if goal.labels else test[target].to_numpy(float)
    return {
        "table": table, "system": system, "seconds": seconds, "seed": seed, "metric": score.name,
        "greater": score.greater_is_better, "score": score(truth, predicted), "taken": round(taken, 1),
    }  # fmt: skip


def fitted(
    wanted: Sequence[tuple[str, str, int]], seconds: float, shares: Sequence[Sequence[int]]
) -> Iterator[dict[str, Any]]:
    """Run these fits in separate processes, as many at a time as there are shares of the cores."""
    free: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    for share in shares:
        free.put(share)

    def fit(table: str, system: str, seed: int) -> dict[str, Any]:
        own = free.get()
        one = ["--one", table, system, str(seconds), str(seed), ",".join(map(str, own))]
        ran = subprocess.run([sys.executable, "-m", "benchmarks.automl", *one], capture_output=True, text=True)
        free.put(own)
        if ran.returncode:
            raise RuntimeError(f"{system} on {table} failed:\n{ran.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return found

    with ThreadPoolExecutor(len(shares)) as pool:
        for ended in as_completed([pool.submit(fit, *each) for each in wanted]):
            yield ended.result()


def report(results: list[dict[str, Any]]) -> None:
    """Print tables, ranks and gaps; only tables that all systems have fitted with equal seeds count."""
    found = pd.DataFrame(results)
    rows: list[tuple[str, str]] = []
    ranks: list[pd.Series[Any]] = []
    gaps: dict[str, float] = {}
    tables: dict[str, Any] = {}
    for table, some in found.groupby("table", sort=False):
        grid = some.pivot_table(index="seed", columns="system", values="score").dropna()
        if set(grid.columns) != set(found["system"]) or grid.empty:
            continue
        greater = bool(some["greater"].iloc[0])
        ranks.append(grid.rank(axis=1, ascending=not greater).mean())
        mean = grid.mean()
        best = float(mean.max() if greater else mean.min())
        gaps[str(table)] = float((best - mean["hydra"]) / best if greater else (mean["hydra"] - best) / best)
        tables[str(table)] = {name: round(float(value), 5) for name, value in mean.items()}
        cells = ", ".join(
            f"{n} {mean[n]:.4f} ({grid[n].min():.4f} to {grid[n].max():.4f})" for n in SYSTEMS if n in mean
        )
        rows.append((f"{table} ({some['metric'].iloc[0]}, {len(grid)} seeds)", cells))
    if not ranks:
        finish([("results", "no table is complete yet")], {"mean_rank": None, "worst_relative_gap": None, "tables": {}})
        return
    mean_rank = pd.concat(ranks, axis=1).mean(axis=1).round(3).to_dict()
    late = found[found["system"] == "hydra"]
    worst_time = float((late["taken"] / late["seconds"]).max())
    rows.append(("mean rank", ", ".join(f"{name} {rank}" for name, rank in mean_rank.items())))
    rows.append(("worst relative gap to the best", f"{max(gaps.values()):.4f} on {max(gaps, key=lambda t: gaps[t])}"))
    rows.append(("longest fit of Hydra Tune over its time", f"{worst_time:.3f}"))
    document = {
        "mean_rank": mean_rank, "worst_relative_gap": max(gaps.values()), "tables": tables, "gaps": gaps,
        "neural_rank": {name: mean_rank[name] for name in NEURAL if name in mean_rank}, "time_ratio": worst_time,
    }  # fmt: skip
    finish(rows, document)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two tables, 10 seconds, one seed, a fresh file")
    parser.add_argument("--tables", default=",".join(TABLES), help="names, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="names, separated by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument(
        "--at-once", type=int, default=1, help="fits at the same time, each with its share of the cores"
    )
    parser.add_argument("--results", type=Path, default=None, help="default build/automl-MINUTES-CORES.jsonl")
    parser.add_argument("--report", action="store_true", help="only report what the file has")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        table, system, seconds, seed, own = given.one
        os.sched_setaffinity(0, [int(core) for core in own.split(",")])
        print(json.dumps(measure(table, system, float(seconds), int(seed))))
        return
    if given.quick:
        given.tables, given.minutes, given.seeds = "wine,diabetes", 1 / 6, 1
        given.results = Path(tempfile.mkdtemp()) / "quick.jsonl"
    seconds = 60 * given.minutes
    share = sorted(os.sched_getaffinity(0))
    shares = [share[i :: given.at_once] for i in range(given.at_once)]
    path = given.results or Path("build") / f"automl-{given.minutes:g}-{len(shares[0])}.jsonl"
    results = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(r["table"], r["system"], r["seed"]) for r in results}
    wanted = [(t, s, n) for n in range(given.seeds) for t in given.tables.split(",") for s in given.systems.split(",")]
    path.parent.mkdir(parents=True, exist_ok=True)
    if not given.report:
        left = [each for each in wanted if each not in done]
        for result in fitted(left, seconds, shares):
            results.append(result)
            said = "{table} {system} seed {seed}: {score:.4f} in {taken} s".format(**result)
            print(f"{said} ({len(results)})", file=sys.stderr, flush=True)
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
    report(results)


if __name__ == "__main__":
    main()
