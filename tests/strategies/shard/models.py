"""Small candidates in float64 with features that are hard to train in shards, and both ways to train them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import hydra_tune as ht
from hydra_tune.core.errors import Infeasible
from hydra_tune.spill.device_memory import DeviceMemory
from hydra_tune.spill.store import SpillFiles
from hydra_tune.strategies.shard.exchange import put_together, take_apart
from hydra_tune.strategies.shard.kit import Kit
from hydra_tune.strategies.shard.prepare import MARGIN, Prospect, make_kit, observe_candidate
from hydra_tune.strategies.shard.skeleton import empty_parameters
from hydra_tune.strategies.shard.trial import ShardedTrial
from hydra_tune.training.loop import Training
from hydra_tune.training.prepared import Prepared

CPU = torch.device("cpu")
SEED = 5
CLASSES = 3


def mlp(width: int, depth: int, dropout: float) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, width)]
    for _ in range(depth):
        layers += [nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(width, CLASSES))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        channels = max(2, width // 4)
        self.stem, self.norm = nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.blocks = nn.Sequential(*(ResidualBlock(channels) for _ in range(depth)))
        self.dropout, self.head = dropout, nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu_(self.norm(self.stem(x.view(-1, 1, 2, 3))))
        x = self.blocks(x).mean((2, 3))
        return self.head(F.dropout(x, self.dropout, self.training))


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.p, self.dropout = dropout, nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.size()
        q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.p if self.training else 0.0, is_causal=True)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.mlp(self.ln_2(x))


class Transformer(nn.Module):
    """Reads its rows as tokens, and ends in the tied embedding."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(8, width), nn.Parameter(torch.randn(6, width) * 0.1)
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 8, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x * 2).long().clamp(-4, 3) + 4
        h = F.dropout(self.tokens(tokens) + self.positions[: x.size(1)], self.dropout, self.training)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))[:, -1, :CLASSES]


class TwoTowers(nn.Module):
    """Two inputs, one of which is used again late; a buffer that its forward updates; parts that nothing trains."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.left, self.right = mlp(width, depth, dropout), nn.Linear(6, CLASSES)
        self.late, self.unused = nn.Linear(6 + CLASSES, CLASSES), nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(CLASSES))
        self.seen: torch.Tensor

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
        h = self.left(x) + scale * self.right(y)
        if self.training:
            self.seen.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        else:
            self.seen.mul_(1.0).add_(h.detach().mean(0), alpha=0.0)
        return self.late(torch.cat([x, h], 1)) - self.seen


class Skips(nn.Module):
    """Links that skip over layers and meet in one sum, whose backward gives all of them the same tensor; and a buffer
    that all layers read."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6 if not i else width, width) for i in range(depth + 3))
        self.head = nn.Linear(width, CLASSES)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.layers[0](x)]
        for layer in self.layers[1:]:
            made.append(layer(made[-1]) * self.scale)
        return self.head(sum(made[:-1], made[-1]))


class Negated(torch.autograd.Function):
    """Turns gradients around, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return -gradients[0]


class Reversal(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Negated.apply(x)  # type: ignore[no-untyped-call, no-any-return]


class Features(nn.Module):
    """A part whose forward runs without gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(6, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.tanh(self.inner(x))


class HalfTrained(nn.Module):
    """A backbone without gradients, and a layer whose gradients are turned around."""

    def __init__(self, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.features = Features(width)
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth + 1)))
        self.turned = Reversal()
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.turned(self.layers(self.features(x)))))


MODELS: dict[str, Callable[[int, int, float], nn.Module]] = {
    "mlp": mlp, "resnet": ResNet, "transformer": Transformer, "two inputs": TwoTowers, "named inputs": TwoTowers,
    "skips": Skips, "half trained": HalfTrained,
}  # fmt: skip


class Pairs:
    """A dataset whose rows have two inputs."""

    def __init__(self, rows: TensorDataset, *, named: bool) -> None:
        self.rows, self.named = rows, named

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, target = self.rows[index]
        return ({"y": x.flip(0), "x": x} if self.named else (x, x.flip(0))), target


def rows(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0.4).long())


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return (outputs.argmax(1) == targets).double().mean().item()


def candidate(
    kind: str = "mlp", width: int = 8, depth: int = 2, dropout: float = 0.3, count: int = 23, frozen: bool = False,
    **fields: Any,
) -> ht.Candidate:  # fmt: skip
    """A candidate that is the same each time: its weights come from one seed."""
    torch.manual_seed(1)
    model = MODELS[kind](width, depth, dropout).double()
    if frozen:
        for parameter in list(model.parameters())[2:4]:
            parameter.requires_grad_(False)
    data: list[Any] = [rows(count), rows(11)]
    if "inputs" in kind:
        data = [Pairs(each, named=kind == "named inputs") for each in data]
    given: dict[str, Any] = {
        "model": model, "loss": F.cross_entropy, "optimizer": Adam, "train": data[0], "valid": data[1],
        "batch_size": 5, "epochs": 2, "metrics": {"accuracy": accuracy},
    }  # fmt: skip
    return ht.Candidate(**(given | fields))


def Adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


# Training both ways


def start(made: ht.Candidate) -> Training:
    return Training(made, made.train, made.valid, SEED, CPU)


def finish(training: Training) -> Training:
    """Train to the last epoch."""
    while training.epoch < training.candidate.epochs:
        training.train_for(1e9)
        training.end_epoch()
    return training


@dataclass
class Sharded:
    """A trial in shards in this process, with what is needed to take it up, cut it anew and look at its state."""

    prospect: Prospect
    kit: Kit
    files: SpillFiles
    memory: DeviceMemory
    data: tuple[int, int, int]
    shapes: dict[str, torch.Tensor]
    rebuild: Callable[[], ht.Candidate] | None = None
    """Makes the candidate again in each worker, where a pickled copy cannot be made."""

    @property
    def least(self) -> int:
        """The smallest budget for which it can be cut."""
        return budget_of(self.prospect, 0.0)

    def worker(self) -> ShardedTrial:
        """The trial as a worker has it that has never seen it before."""
        if self.rebuild is None:
            return ShardedTrial(cloudpickle.loads(cloudpickle.dumps(self.kit)), self.memory, self.files)
        made = self.rebuild()
        empty_parameters(made.model)
        return ShardedTrial(replace(self.kit, prepared=Prepared(made, made.train, made.valid)), self.memory, self.files)

    def state(self) -> dict[str, Any]:
        self.files.reload()
        return put_together(self.files, self.kit.plan, self.kit.parts, self.data)

    def cut_again(self, budget: int) -> None:
        state = self.state()
        prepared = self.kit.prepared
        self.kit = _kit(self.prospect, prepared, budget, self.shapes)
        take_apart(state, self.kit.plan, self.kit.parts, self.files, commits=1)


def _kit(prospect: Prospect, prepared: Prepared, budget: int, shapes: Mapping[str, torch.Tensor]) -> Kit:
    return make_kit(prospect, prospect.shards(budget), prepared, SEED, dict(shapes))


@contextmanager
def in_shards(training: Training, share: float, folder: Path, prefetch: bool = True) -> Iterator[Sharded]:
    """Take a training apart, for a budget between the least that can do (share 0) and what holds all of it (1)."""
    prospect = observe_candidate(training, folder / "profiles")
    budget = budget_of(prospect, share)
    prepared = Prepared(training.candidate, training.batches.data, training.valid and training.valid.data)
    tensors = training.named_tensors()
    kit = _kit(prospect, prepared, budget, tensors)
    files = SpillFiles([folder], "trial")
    take_apart(training.state(), kit.plan, kit.parts, files)
    shapes = {
        name: nn.Parameter(t.to("meta"), requires_grad=False) if isinstance(t, nn.Parameter) else t.to("meta")
        for name, t in tensors.items()
    }
    empty_parameters(training.model)
    memory = DeviceMemory(budget, CPU, prefetch=prefetch)
    try:
        yield Sharded(prospect, kit, files, memory, training.data_shape(), shapes)
    finally:
        memory.close()
        files.remove()


def budget_of(prospect: Prospect, share: float) -> int:
    """The smallest budget in bytes with which the model can be cut, and so much of the way to all of it."""
    try:
        prospect.shards(1)
    except Infeasible as error:
        least = int(error.needed_bytes / (1 - MARGIN)) + 1
    most = least
    while len(prospect.shards(most)) > 1:
        most = int(most * 1.5)
    return least + int(share * (most - least))


def finish_in_shards(sharded: Sharded, *, anew: bool = False, seconds: float = 1e9) -> None:
    """Train to the last epoch; `anew`: each slice by a worker that has not seen the trial before."""
    trial = sharded.worker()
    while trial.logbook.epoch < trial.candidate.epochs:
        while not trial.train_for(seconds).epoch_done:
            assert sharded.memory.peak <= sharded.memory.budget
            trial.commit()
            if anew:
                trial.close()
                trial = sharded.worker()
            else:
                trial.take_up()
        trial.end_epoch()
        assert sharded.memory.peak <= sharded.memory.budget
    trial.close()


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    """Equal trees, tensors and numbers to 1e-9."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor), where
        assert found.dtype == expected.dtype, where
        torch.testing.assert_close(found, expected.detach(), rtol=1e-9, atol=1e-9, msg=lambda m: f"{where}: {m}")
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{i}]")
    elif isinstance(expected, float):
        assert abs(found - expected) <= 1e-9 * max(1.0, abs(expected)) or found == expected, where
    else:
        assert (found == expected) is True or bool((found == expected).all()), where
