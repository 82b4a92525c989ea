"""Converts between a plain `Training` and a trial in shards: writes its state to blocks, and puts it together again.

Both directions run in the builder, in host memory. A checkpoint of a sharded trial is therefore that of a whole one:
either strategy goes on from the other's, and a trial can be cut anew at any commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hydra_tune.spill.layout import Layout
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.shard.logbook import Logbook, as_scalar, plain_scalar
from hydra_tune.strategies.shard.optimizers import OptimizerParts
from hydra_tune.strategies.shard.plan import Blocks, Bundle


def take_apart(
    state: dict[str, Any], plan: Blocks, parts: OptimizerParts, files: SpillFiles, *, commits: int = 0,
    attributes: dict[str, dict[str, Any]] | None = None,
) -> None:  # fmt: skip
    """Write a training's state, as `Training.state` returns it, to a trial's files, and commit it."""
    position, gradients, optimizer = state["position"], state["gradients"], state["optimizer"]
    own = {parts.order[index]: kept for index, kept in optimizer["state"].items()}
    logbook = Logbook(
        random=state["random"], schedule=state["scheduler"], history=list(state["history"]), extra=state["extra"],
        groups=[{k: v for k, v in group.items() if k != "params"} for group in optimizer["param_groups"]],
        touched=set(gradients), kept=state["kept"] is not None, commits=commits,
        attributes=attributes or {},
        **{name.removeprefix("_"): value for name, value in position.items()},
    )  # fmt: skip
    for key in list(files.committed):
        files.delete(key)  # of an earlier cut
    for bundle in plan.bundles:
        for key, layout in _weight_blocks(bundle).items():
            _write(files, key, layout, state["tensors"])
            if logbook.kept:
                _write(files, f"k/{key}", layout, state["kept"])
        kept = _optimizer_tensors(bundle, own, logbook)
        for key, layout in bundle.optimizer.items():
            _write(files, key, layout, kept)
        if logbook.touched.intersection(bundle.parameters):
            _write(files, f"g/{bundle.name}", bundle.gradients, gradients)
    for key, layout in plan.buffers.items():
        _write(files, key, layout, state["tensors"])
        if logbook.kept:
            _write(files, f"k/{key}", layout, state["kept"])
    files.commit(logbook.as_json())


def _weight_blocks(bundle: Bundle) -> dict[str, Layout]:
    """Return the layouts of the blocks with a bundle's weights, by key: all that is kept of an epoch."""
    return {f"w/{bundle.name}": bundle.weights, **bundle.survivors}


def _write(files: SpillFiles, key: str, layout: Layout, tensors: Mapping[str, Any]) -> None:
    if layout.size:
        block = torch.empty(layout.size, dtype=torch.uint8)
        with torch.no_grad():
            layout.fill(block, tensors)
        files.write(key, 0, block)


def _optimizer_tensors(bundle: Bundle, own: Mapping[str, Mapping[str, Any]], logbook: Logbook) -> dict[str, Any]:
    """Return the tensors that an optimizer keeps for a bundle; its plain numbers go to the logbook."""
    inside = {field.name for layout in bundle.optimizer.values() for field in layout.fields}
    found: dict[str, Any] = {}
    for name in bundle.parameters:
        if name in own:
            found |= {f"{name}/{key}": value for key, value in own[name].items() if f"{name}/{key}" in inside}
            logbook.started[name] = {k: plain_scalar(v) for k, v in own[name].items() if f"{name}/{k}" not in inside}
    return found


def put_together(files: SpillFiles, plan: Blocks, parts: OptimizerParts, data: tuple[int, int, int]) -> dict[str, Any]:
    """Return the state of the last commit in the form of `Training.state`."""
    logbook = Logbook.from_json(files.notes)
    tensors: dict[str, torch.Tensor] = {}
    gradients: dict[str, torch.Tensor] = {}
    optimizer: dict[int, dict[str, Any]] = {}
    for bundle in plan.bundles:
        for key, layout in _weight_blocks(bundle).items():
            tensors |= _read(files, key, layout)
        if logbook.touched.intersection(bundle.parameters):
            found = _read(files, f"g/{bundle.name}", bundle.gradients)
            gradients |= {name: gradient for name, gradient in found.items() if name in logbook.touched}
        views: dict[str, torch.Tensor] = {}
        for key, layout in bundle.optimizer.items():
            views |= _read(files, key, layout)
        for name in bundle.parameters:
            if name in logbook.started:
                own = {key.removeprefix(f"{name}/"): v for key, v in views.items() if key.startswith(f"{name}/")}
                scalars = {key: as_scalar(value) for key, value in logbook.started[name].items()}
                if scalars or own:
                    optimizer[parts.order.index(name)] = {**scalars, **own}
    for key, layout in plan.buffers.items():
        tensors |= _read(files, key, layout)
    return {
        "tensors": tensors,
        "gradients": gradients,
        "optimizer": {"state": optimizer, "param_groups": _groups(parts, logbook)},
        "scheduler": logbook.schedule,
        "random": logbook.random,
        "position": {
            "epoch": logbook.epoch, "batch": logbook.batch, "steps": logbook.steps, "loss_sum": logbook.loss_sum,
            "loss_rows": logbook.loss_rows,
        },
        "history": logbook.history,
        "kept": kept_weights(files, plan) if logbook.kept else None,
        "data": data,
        "extra": logbook.extra,
    }  # fmt: skip


def present_weights(files: SpillFiles, plan: Blocks) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of the last commit."""
    return _tensors(files, plan, "")


def kept_weights(files: SpillFiles, plan: Blocks) -> dict[str, torch.Tensor]:
    """Return the weights of the best epoch so far."""
    return _tensors(files, plan, "k/")


def _tensors(files: SpillFiles, plan: Blocks, prefix: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for bundle in plan.bundles:
        for key, layout in _weight_blocks(bundle).items():
            found |= _read(files, f"{prefix}{key}", layout)
    for key, layout in plan.buffers.items():
        found |= _read(files, f"{prefix}{key}", layout)
    return found


def _groups(parts: OptimizerParts, logbook: Logbook) -> list[dict[str, Any]]:
    return [
        {**options, "params": [i for i, name in enumerate(parts.order) if parts.group_of[name] == group]}
        for group, options in enumerate(logbook.groups)
    ]


def _read(files: SpillFiles, key: str, layout: Layout) -> dict[str, torch.Tensor]:
    block = torch.empty(layout.size, dtype=torch.uint8)
    if layout.size:
        files.read(key, block)
    return layout.views(block)
