"""A recorded program does what the model does, bit for bit, in training and in evaluation; what cannot be recorded is
called as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves

from hydra_tune.core.trees import call_model
from hydra_tune.graph.capture import Captured, capture

WIDTH = 6


def rows(count: int = 5, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count))


def tokens(count: int, length: int) -> torch.Tensor:
    return torch.randint(0, 11, (count, length), generator=torch.Generator().manual_seed(count))


def outcome(run: Callable[[], Any], model: nn.Module, *, training: bool) -> list[torch.Tensor]:
    """All tensors that a run gives, the gradients that it makes, and the buffers that it leaves; these are put back."""
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.zero_grad()
    model.train(training)
    torch.manual_seed(17)
    outputs = [leaf for leaf in tree_leaves(run()) if isinstance(leaf, torch.Tensor)]
    if training:
        sum(out.double().pow(2).sum() for out in outputs if out.requires_grad).backward()
    found = [out.detach().clone() for out in outputs]
    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    found += [buffer.clone() for buffer in model.buffers()]
    found.append(torch.get_rng_state())
    with torch.no_grad():
        for name, buffer in before.items():
            model.get_buffer(name).copy_(buffer)
    return found


def equals_the_model(captured: Captured, model: nn.Module, *batches: Any) -> None:
    program = captured.program

    def run(inputs: Any, training: bool) -> Any:
        values = dict(enumerate(program.bind(inputs)))
        program.run(model, values, 0, len(program), training=training)
        return program.outputs(values)

    for training in (True, False):
        for inputs in batches:
            expected = outcome(partial(call_model, model, inputs), model, training=training)
            found = outcome(partial(run, inputs, training), model, training=training)
            assert len(found) == len(expected)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)


def captured_exactly(model: nn.Module, pilot: Any, *more: Any) -> Captured:
    captured = capture(model, pilot, [pilot, *more[:1]])
    equals_the_model(captured, model, pilot, *more)
    nodes = captured.nodes
    assert [node.stop for node in nodes[:-1]] == [node.start for node in nodes[1:]]
    assert (nodes[0].start, nodes[-1].stop) == (0, len(captured.program))
    return captured


def names(captured: Captured) -> list[str]:
    return [node.name for node in captured.nodes]


def test_a_sequence_of_layers_has_a_node_for_each_layer_with_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    captured = captured_exactly(model, rows(), rows(3))
    assert names(captured) == ["0", "1", "4"]
    assert captured.nodes[1].parameters == ("1.weight", "1.bias")
    assert captured.nodes[1].buffers == ("1.running_mean", "1.running_var", "1.num_batches_tracked")
    assert captured.whole_because == ""


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.relu(self.first(x))
        y = self.norm(x)
        x = x + torch.tanh(self.second(y))
        return self.last(x)


def test_residual_links_cross_the_cuts() -> None:
    captured = captured_exactly(Residual(), rows(), rows(2))
    assert names(captured) == ["first", "norm", "second", "last"]
    before_second = captured.nodes[2].start
    assert len(captured.program.crossing(before_second)) == 2, "the link and the norm's result"


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        assert width % heads == 0
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.width, self.dropout = heads, width, dropout
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (part.view(B, T, self.heads, C // self.heads).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.out(y))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, dropout)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Written as nanoGPT is."""

    def __init__(self, length: int = 8, width: int = 12, heads: int = 3, layers: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.length, self.dropout = length, dropout
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(11, width),
                "wpe": nn.Embedding(length, width),
                "h": nn.ModuleList([Block(width, heads, dropout) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, 11, bias=False)
        self.transformer.wte.weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        device = idx.device
        b, t = idx.size()
        assert t <= self.length, f"a sequence of {t} is longer than {self.length}"
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        x = F.dropout(x, self.dropout, self.training)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        logits = self.lm_head(x)
        if targets is not None:
            return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits.view(b, t, -1) * (1.0 / math.sqrt(t))


def test_a_gpt_with_a_tied_head_is_cut_at_every_layer_and_takes_other_shapes() -> None:
    captured = captured_exactly(GPT(), tokens(4, 8), tokens(3, 8), tokens(2, 5))
    inside = {"ln_1", "attn.qkv", "attn.out", "ln_2", "mlp.0", "mlp.2"}
    blocks = {f"transformer.h.{i}.{name}" for i in range(2) for name in inside}
    assert set(names(captured)) == blocks | {"transformer.wte", "transformer.wpe", "transformer.ln_f", "lm_head"}
    assert captured.nodes[-1].parameters == captured.nodes[0].parameters, "the tied weight goes by one name"


def test_an_argument_with_a_default_can_be_given_by_the_batch() -> None:
    pilot = {"idx": tokens(4, 8), "targets": tokens(4, 8)}
    captured = captured_exactly(GPT(), pilot, {name: value[:2] for name, value in pilot.items()})
    assert captured.program.inputs == ("idx", "targets")
    assert len(captured.nodes) == 16


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(6, 4), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, scale: float = 0.5, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        h = self.left(x) * scale + self.right(y)
        if mask is not None:
            h = h * mask
        return self.out(h)


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_inputs_by_position(kind: type) -> None:
    captured = captured_exactly(TwoInputs(), kind((rows(), rows(5, 3))), kind((rows(2), rows(2, 3))))
    assert captured.program.inputs == ("x", "y")
    assert len(captured.nodes) == 3


def test_several_inputs_by_name_in_any_order() -> None:
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    pilot = {"y": rows(5, 3), "mask": mask, "x": rows()}
    captured = captured_exactly(TwoInputs(), pilot, {"x": rows(2), "y": rows(2, 3), "mask": mask})
    assert captured.program.inputs == ("x", "y", "mask")
    assert len(captured.nodes) == 3


class AnyNumber(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.second(F.relu(self.first(torch.stack(inputs).sum(0))))


@pytest.mark.parametrize("count", [1, 2])
def test_a_forward_that_takes_any_number_of_inputs(count: int) -> None:
    captured_exactly(AnyNumber(), tuple(rows(4 + i)[:4] for i in range(count)))


class Recurrent(nn.Module):
    """LSTMs return tuples of tuples; the model returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(11, 6), nn.LSTM(6, 5, num_layers=2, batch_first=True, dropout=0.3)
        self.gru, self.out = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden, (last, cell) = self.lstm(self.embed(x))
        hidden, _ = self.gru(hidden)
        return {"logits": self.out(hidden[:, -1]), "state": [last, cell], "steps": x.shape[1]}


def test_modules_that_return_tuples_and_a_model_that_returns_a_dict() -> None:
    captured = captured_exactly(Recurrent(), tokens(4, 7), tokens(2, 7), tokens(3, 4))
    assert names(captured) == ["embed", "lstm", "gru", "out"]


class ReturnsItsWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))
        self.last = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.last(self.first(x) * self.scale), self.scale


def test_a_model_that_returns_a_parameter_for_its_loss() -> None:
    captured = captured_exactly(ReturnsItsWeight(), rows(), rows(2))
    assert captured.whole_because == "it returns one of its own parameters or buffers"


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.relu, self.dropout = nn.ReLU(inplace=True), nn.Dropout(0.4, inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.relu(self.first(x))
        h = self.dropout(self.second(h).add_(0.5))
        h.mul_(2.0)  # the result is not bound: whoever uses h afterwards sees it
        return self.third(h)


def test_operations_in_place() -> None:
    captured = captured_exactly(InPlace(), rows(), rows(3))
    assert names(captured) == ["first", "second", "third"]


class Assigns(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, 0] = 0.25
        return x


def test_assigning_to_a_part_of_a_tensor_closes_the_module() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Assigns(), nn.Linear(6, 2))
    assert names(captured_exactly(model, rows(), rows(3))) == ["0", "2"]


class Tokens(nn.Module):
    """Uses parameters by themselves, as a vision transformer does its class token and positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.token, self.scale = nn.Parameter(torch.randn(1, 6)), nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.token.expand(x.size(0), -1), self.first(x)]) * self.scale
        return self.last(x + self.scale[:6].sum())


def test_parameters_that_are_used_by_themselves() -> None:
    captured = captured_exactly(Tokens(), rows(), rows(3))
    assert captured.whole_because == ""
    assert {name for node in captured.nodes for name in node.parameters} == dict(Tokens().named_parameters()).keys()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.norm(F.relu(self.layer(x)))
        return self.out(x)


def test_a_module_that_is_called_again_has_a_node_for_each_call() -> None:
    captured = captured_exactly(Twice(), rows(), rows(3))
    assert names(captured) == ["layer", "norm"] * 3 + ["out"]


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_modules(wrap: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(wrap(nn.Linear(6, 8)), nn.Tanh(), wrap(nn.Linear(8, 8)), nn.Linear(8, 2))
    captured = captured_exactly(model, rows(), rows(3))
    owned = [name for node in captured.nodes for name in node.parameters]
    assert sorted(owned) == sorted(dict(model.named_parameters())), "each parameter belongs to a node"


class Decides(nn.Module):
    """Its path depends on what is in a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calm, self.wild = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wild(x) if x.sum() > 0 else self.calm(x)


def test_a_module_that_looks_at_contents_is_called_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Decides(), nn.Linear(6, 2))
    captured = captured_exactly(model, rows(), rows(3), -rows(), -rows(2))
    assert names(captured) == ["0", "1", "2"]
    assert captured.nodes[1].parameters == ("1.calm.weight", "1.calm.bias", "1.wild.weight", "1.wild.bias")
    assert captured.whole_because == ""


def test_a_model_that_looks_at_contents_itself_is_one_node_with_the_reason() -> None:
    captured = captured_exactly(Decides(), rows(), rows(3), -rows())
    assert len(captured.nodes) == 1
    assert "a decision of a tensor's contents" in captured.whole_because


class Unlike(nn.Module):
    """Takes another path in evaluation."""

    def __init__(self, root: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.inner = nn.Identity() if root else Unlike(root=True)
        self.helper = nn.Linear(6, 6)
        self.root = root

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.first(x))
        if self.training and self.root:
            x = self.helper(x) + torch.randn_like(x)
        return x


def test_a_path_that_differs_in_training_and_evaluation_closes_the_module_or_the_model() -> None:
    inside = captured_exactly(Unlike(root=False), rows(), rows(3))
    assert names(inside) == ["first", "inner"]
    root = captured_exactly(Unlike(root=True), rows(), rows(3))
    assert len(root.nodes) == 1
    assert "the same path" in root.whole_because


class Bakes(nn.Module):
    """Runs over rows by a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return torch.stack([self.second(h[i]) for i in range(x.shape[0])])


def test_a_batch_size_that_is_written_into_the_recording_is_noticed_by_the_smaller_batch() -> None:
    captured = captured_exactly(Bakes(), rows(5), rows(3))
    assert len(captured.nodes) == 1
    assert captured.whole_because
    unrolled = capture(Bakes(), rows(5), [rows(5)])
    assert len(unrolled.nodes) == 6, "where all batches have one size it may be written down"


class KeepsCount(nn.Module):
    """Buffers that the forward itself updates: in place, by assignment, and by arithmetic on a copy."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(6, 6), nn.Linear(6, 2), how
        self.register_buffer("count", torch.ones(()))
        self.register_buffer("mean", torch.ones(6))
        self.count: torch.Tensor
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.how == "in place":
            self.count += 1
        elif self.how == "assigned":
            self.count = self.count + 1
        elif self.how == "average":
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        else:
            self.mean.copy_(h.detach().mean(0))
        return self.second(h - self.mean)


@pytest.mark.parametrize("how", ["in place", "assigned", "average", "copied"])
def test_buffers_that_a_forward_updates_are_updated_by_its_program(how: str) -> None:
    captured_exactly(KeepsCount(how), rows(), rows(3))


class Constants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x) * torch.tensor([1.0, -1.0, 1.0, -1.0]) + torch.arange(4)
        return self.second(h + torch.randn(4))


def test_tensors_that_a_forward_makes_of_nothing() -> None:
    model = Constants()
    captured_exactly(model, rows(), rows(3))
    assert not [name for name in vars(model) if "constant" in name], "capture leaves nothing in the model"


class Rotary(nn.Module):
    """Keeps the table of the longest sequence so far, as many implementations do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.table, self.calls = 0, None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        self.calls += 1
        if length > self.seen:
            self.seen, self.table = length, torch.cos(torch.arange(length, dtype=x.dtype))
        return x * self.table[:length]


def test_a_module_that_keeps_something_for_its_next_call_is_called_as_a_whole_and_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(6, 6), Rotary(), nn.Linear(6, 2))
    captured = capture(model, rows(), [rows(), rows(3)])
    assert vars(model[1])["table"] is None
    assert model[1].calls == model[1].seen == 0
    equals_the_model(captured, model, rows(), rows(3))
    assert names(captured) == ["0", "2"]


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.dropout(self.norm(self.first(x)), 0.5, self.training))


def test_capture_leaves_buffers_random_streams_modes_and_gradients_alone() -> None:
    model = Draws()
    model.norm.eval()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    state = torch.get_rng_state()
    capture(model, rows(), [rows(), rows(3)])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert model.first.weight.grad is not None
    assert bool((model.first.weight.grad == 1).all())
