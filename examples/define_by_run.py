"""A build function in Optuna's define-by-run style, that returns a candidate instead of training it.

python examples/define_by_run.py
hydra-tune search examples/define_by_run.py:build --trials 8 --metric accuracy --direction maximize
"""

from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import hydra_tune as ht


def digits(part: str) -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    rows = slice(None, 1400) if part == "train" else slice(1400, None)
    return TensorDataset(torch.tensor(images[rows] / 16, dtype=torch.float32), torch.tensor(labels[rows]))


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    return (outputs.argmax(1) == targets).float().mean().item()


def build(trial):
    width = 64
    layers = []
    for i in range(trial.suggest_int("depth", 1, 3)):
        out = trial.suggest_int(f"width_{i}", 32, 256, log=True)
        layers += [nn.Linear(width, out), nn.ReLU(), nn.Dropout(trial.suggest_float("dropout", 0.0, 0.5))]
        width = out
    return ht.Candidate(
        model=nn.Sequential(*layers, nn.Linear(width, 10)),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.AdamW, lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True)),
        train=partial(digits, "train"),
        valid=partial(digits, "valid"),
        batch_size=64,
        epochs=5,
        metrics={"accuracy": accuracy},
    )


if __name__ == "__main__":
    result = ht.search(build, trials=8, metric="accuracy", direction="maximize", seed=0)
    print(f"best accuracy {result.best_value:.3f} with {result.best_params}")
    print(result.best_model())
