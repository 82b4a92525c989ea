"""Models of other packages and of torch, and small ones with features that a recording cannot follow."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.hugging_face import HUGGING_FACE, ROWS, VOCABULARY, tokens

Made = tuple[nn.Module, list[tuple[Any, Any]], Callable[[Any, Any], torch.Tensor]]


def _numbers(width: int = 8) -> list[tuple[Any, Any]]:
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(7))
    return [(row, int(row[0] > 0) + int(row[1] > 0.5)) for row in rows]


def _texts() -> list[tuple[Any, Any]]:
    return [(row, row.roll(-1)) for row in tokens(8)]


def of_tokens(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def of_loss(outputs: Any, _targets: Any) -> torch.Tensor:
    """The loss that a model of transformers has computed."""
    found: torch.Tensor = outputs.loss
    return found


def x_transformer() -> Made:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, rotary_pos_emb=True, ff_glu=True)
    return TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=16, attn_layers=layers), _texts(), of_tokens


def tabm() -> Made:
    from tabm import TabM

    model = TabM.make(n_num_features=8, d_out=3, n_blocks=2, d_block=16, k=4)
    rows = [({"x_num": row}, target) for row, target in _numbers()]
    return model, rows, lambda outputs, targets: F.cross_entropy(outputs.flatten(0, 1), targets.repeat_interleave(4))


def ft_transformer() -> Made:
    from rtdl_revisiting_models import FTTransformer

    kwargs = FTTransformer.get_default_kwargs(1)
    model = FTTransformer(n_cont_features=8, cat_cardinalities=[], d_out=3, **kwargs)
    rows = [({"x_cont": row, "x_cat": None}, target) for row, target in _numbers()]
    return model, rows, F.cross_entropy


def collate(samples: list[Any]) -> Any:
    """Torch's collating, which lets None through."""
    inputs = [inputs for inputs, _ in samples]
    targets = torch.utils.data.default_collate([target for _, target in samples])
    if isinstance(inputs[0], dict):
        held = {k: None if v is None else torch.stack([each[k] for each in inputs]) for k, v in inputs[0].items()}
        return held, targets
    return torch.utils.data.default_collate(inputs), targets


def lora() -> Made:
    from peft import LoraConfig, get_peft_model

    model, rows = HUGGING_FACE["GPT-2"]()
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    return adapted, [(row, 0) for row in rows], of_loss


def with_checkpoints() -> Made:
    model, rows = HUGGING_FACE["Llama"]()
    model.gradient_checkpointing_enable()
    return model, [(row, 0) for row in rows], of_loss


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, 0.1, batch_first=True), 3)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.tokens(x)))  # type: ignore[no-any-return]


class Translator(nn.Module):
    """A recurrent encoder and decoder with teacher forcing by Python's random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 16)
        self.encoder, self.cell = nn.LSTM(16, 16, 2, batch_first=True), nn.LSTMCell(16, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, (h, c) = self.encoder(self.tokens(x))
        state, given, outputs = (h[-1], c[-1]), x[:, 0], []
        for step in range(x.shape[1]):
            state = self.cell(self.tokens(given), state)
            outputs.append(self.head(state[0]))
            given = x[:, step] if not self.training or random.random() < 0.5 else outputs[-1].argmax(-1)
        return torch.stack(outputs, 1)


class Dropping(nn.Module):
    """Stochastic depth by NumPy, and an early exit by the contents of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(5))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.training and np.random.rand() < 0.4:
                continue
            x = x + block(x)
            if number > 2 and x.mean() > 0:
                break
        return self.head(x)  # type: ignore[no-any-return]


class Experts(nn.Module):
    """A mixture in which each row goes to one expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(8, 4), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        weights = self.gate(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                out[rows] = expert(x[rows]) * weights[rows, number, None]
        return {"logits": [self.head(out + x)], "balance": weights.mean(0).pow(2).sum()}


def of_experts(outputs: dict[str, Any], targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs["logits"][0], targets) + 0.1 * outputs["balance"]


class Borrowing(nn.Module):
    """Uses weights outside their modules, shares a module, and normalises weights in all three ways of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.third, self.shared = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again, self.head = self.shared, nn.Linear(8, 3)
        self.kept = [self.third.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        view = self.head.weight.t()
        h = self.shared(torch.tanh(self.first(x)))
        h = self.again(torch.relu(self.second(h)))
        h = F.linear(h, self.third.weight) + h @ self.kept[0].detach()
        return self.head(self.third(h)) + h @ view


class Checkpointed(nn.Module):
    """Computes some of its layers again in the backward, in both ways of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        for number, layer in enumerate(self.layers[1:]):
            x = checkpoint(layer, x, use_reentrant=number == 1)
        return self.head(x)  # type: ignore[no-any-return]


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in ((1, 4), (4, 8)))
        self.middle = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in ((8, 8), (16, 4)))
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = x.view(-1, 1, 8, 8), []
        for layer in self.down:
            x = F.relu_(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = torch.cat([layer(x), skip], 1)
        return self.head(x).mean((2, 3))  # type: ignore[no-any-return]


OTHERS: dict[str, Callable[[], Made]] = {
    "x-transformers": x_transformer,
    "TabM": tabm,
    "FT-Transformer": ft_transformer,
    "LoRA (peft, GPT-2)": lora,
    "Llama, checkpointed": with_checkpoints,
    "nn.TransformerEncoder": lambda: (Encoder(), _texts(), of_tokens),
    "seq2seq LSTM": lambda: (Translator(), _texts(), of_tokens),
    "stochastic depth": lambda: (Dropping(), _numbers(), F.cross_entropy),
    "mixture of experts": lambda: (Experts(), _numbers(), of_experts),
    "borrowed weights": lambda: (Borrowing(), _numbers(), F.cross_entropy),
    "torch.utils.checkpoint": lambda: (Checkpointed(), _numbers(), F.cross_entropy),
    "U-Net": lambda: (UNet(), _numbers(64), F.cross_entropy),
}
