"""The test accelerator behaves like an accelerator, and catches programs that forget to wait."""

from __future__ import annotations

import ctypes
import os
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.accelerator.process import on_device

DEVICE = "testdev:0"
MIB = 2**20


def _backend():  # type: ignore[no-untyped-def]
    from tests.accelerator import backend

    return backend


@on_device
def test_the_host_cannot_touch_the_memory() -> None:
    tensor = torch.ones(4, device=DEVICE)
    torch.accelerator.synchronize()
    child = os.fork()
    if not child:
        ctypes.string_at(tensor.data_ptr(), 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV
    assert tensor.tolist() == [1.0] * 4


@on_device
def test_memory_has_a_budget_and_is_counted() -> None:
    backend = _backend()
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info(DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)
    backend.set_memory(0, total - free + 8 * MIB)
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    held = torch.empty(6 * MIB, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(torch.OutOfMemoryError, match="testdev:0 is out of memory"):
        torch.empty(3 * MIB, dtype=torch.uint8, device=DEVICE)
    assert torch.accelerator.memory_allocated(DEVICE) - before == 6 * MIB
    assert torch.accelerator.get_memory_info(DEVICE)[0] == 2 * MIB
    del held
    again = torch.empty(8 * MIB, dtype=torch.uint8, device=DEVICE)  # of what was cached, joined with the rest
    assert torch.accelerator.max_memory_allocated(DEVICE) - before == 8 * MIB
    del again
    assert torch.accelerator.memory_allocated(DEVICE) == before
    backend.set_memory(0, total)
    torch.accelerator.empty_cache()
    assert torch.accelerator.get_memory_info(DEVICE) == (free, total)


@on_device
def test_the_other_device_has_memory_and_a_stream_of_its_own() -> None:
    ours = torch.arange(5.0, device="testdev:1")
    assert torch.accelerator.current_device_index() == 0
    before = torch.accelerator.memory_allocated("testdev:0")
    with torch.Stream("testdev:1"):
        assert torch.accelerator.current_device_index() == 1
    moved = ours.to("testdev:0")
    assert moved.device == torch.device("testdev:0")
    assert moved.tolist() == [0, 1, 2, 3, 4]
    assert torch.accelerator.memory_allocated("testdev:0") > before


@on_device
@pytest.mark.parametrize("late", ["copying", "computing"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_gives_wrong_numbers(late: str, waits: bool) -> None:
    """One stream fills a tensor that another reads, or reads one that another overwrites: with waits and without."""
    copying, computing = torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE)
    first, second = torch.ones(100).pin_memory(), torch.full((100,), 2.0).pin_memory()
    held = torch.zeros(100, device=DEVICE)
    torch.accelerator.synchronize()
    with _backend().held(copying if late == "copying" else computing):
        with copying:
            held.copy_(first, non_blocking=True)
        if waits:
            computing.wait_event(copying.record_event())
        doubled = held * 2
        if waits:
            copying.wait_event(computing.record_event())
        with copying:
            held.copy_(second, non_blocking=True)
        copying.synchronize()
        computing.synchronize()
    found = doubled.cpu()
    assert found.eq(2.0).all() == waits, found[:3]


@on_device
@pytest.mark.parametrize("announced", [True, False])
def test_memory_freed_too_early_is_reused(announced: bool) -> None:
    other, current = torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE)
    torch.accelerator.empty_cache()
    held, kept = torch.ones(MIB, device=DEVICE), torch.zeros(MIB).pin_memory()
    other.wait_event(current.record_event())
    with _backend().held(other):
        with other:
            kept.copy_(held, non_blocking=True)
        if announced:
            held.record_stream(other)
        del held
        fresh = torch.zeros(MIB, device=DEVICE)
        current.synchronize()
        other.synchronize()
    assert kept.eq(1.0).all() == announced
    assert not fresh.any()


@on_device
def test_delays_do_not_change_what_is_waited_for() -> None:
    backend = _backend()

    def chain() -> torch.Tensor:
        copying, current = torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE)
        total, block = torch.zeros(1000, device=DEVICE), torch.zeros(1000, device=DEVICE)
        for number in range(20):
            copying.wait_event(current.record_event())
            with copying:
                block.copy_(torch.full((1000,), float(number)).pin_memory(), non_blocking=True)
            current.wait_event(copying.record_event())
            total += block
        return total.cpu()

    backend.set_delays(7, 300)
    found = chain()
    backend.set_delays(0, 0)
    assert found.eq(190.0).all()


@on_device
def test_events_and_the_devices_clock() -> None:
    backend = _backend()
    backend.set_rates(operations=1e9, copy_in=1e6, copy_out=1e6)
    try:
        stream = torch.accelerator.current_stream(DEVICE)
        host = torch.ones(1000, dtype=torch.uint8).pin_memory()
        left, right = torch.ones(10, 100, device=DEVICE), torch.ones(100, 50, device=DEVICE)
        torch.accelerator.synchronize()
        began, ended = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
        with backend.traced() as trace, backend.held(stream):
            began.record(stream)
            on_device = host.to(DEVICE, non_blocking=True)
            left @ right
            ended.record(stream)
            assert not ended.query()
            ended.synchronize()
        assert ended.query()
        assert began.elapsed_time(ended) == pytest.approx(1.0 + 0.1)
        assert [(t.engine, t.bytes) for t in trace if t.engine == "in"] == [("in", 1000)]
        assert on_device.cpu().eq(1).all()
        two = [torch.Stream(DEVICE), torch.Stream(DEVICE)]
        with backend.traced() as trace:
            for other in two:
                with other:
                    host.to(DEVICE, non_blocking=True)
        assert trace[1].start == pytest.approx(trace[0].end)  # they share one engine
    finally:
        backend.set_rates()
        torch.accelerator.synchronize()


@on_device
def test_errors_of_kernels_come_when_they_are_waited_for() -> None:
    table, index = torch.zeros(3, 2, device=DEVICE), torch.tensor([5], device=DEVICE)
    stream = torch.accelerator.current_stream(DEVICE)
    with _backend().held(stream):
        taken = functional.embedding(index, table)
        with pytest.raises(IndexError):
            taken.cpu()
    assert torch.ones(2, device=DEVICE).sum().item() == 2


@on_device
def test_generators() -> None:
    torch.manual_seed(3)
    first, on_host = torch.rand(4, device=DEVICE).cpu(), torch.rand(4)
    assert first.equal(on_host)  # each draws from a generator of its own
    state = torch.get_device_module(DEVICE).get_rng_state(DEVICE)
    dropped = functional.dropout(torch.ones(100, device=DEVICE))
    assert not functional.dropout(torch.ones(100, device=DEVICE)).equal(dropped)
    torch.get_device_module(DEVICE).set_rng_state(state, DEVICE)
    assert functional.dropout(torch.ones(100, device=DEVICE)).equal(dropped)
    assert torch.rand(4).equal(torch.rand(8, generator=torch.Generator().manual_seed(3))[4:])
    own = torch.Generator("testdev:1").manual_seed(5)
    drawn = torch.randperm(10, generator=own, device="testdev:1").cpu()
    assert drawn.equal(torch.randperm(10, generator=torch.Generator().manual_seed(5)))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.layer(self.embedding(words))).mean(1)
        return out


def _images() -> nn.Module:
    shrink = nn.MaxPool2d(2)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), shrink, nn.Flatten(), nn.Linear(36, 3))


MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)), (5, 8)),
    "images": (_images, (5, 3, 8, 8)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(3, 4, 2), nn.Flatten(), nn.LazyLinear(3)), (5, 3, 6)),
    "attention": (_Attention, None),
}  # fmt: skip


@on_device
@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("optimizer", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("foreach", [True, False])
def test_training_equals_that_of_the_cpu(kind: str, optimizer: str, foreach: bool) -> None:
    make, shape = MODELS[kind]

    def train(device: str) -> tuple[list[torch.Tensor], list[float]]:
        torch.manual_seed(0)
        model = make().double()
        inputs = torch.randint(0, 20, (4, 7)) if shape is None else torch.randn(shape).double()
        model(inputs)  # lazy modules take their shape
        model.to(device)
        steps = getattr(torch.optim, optimizer)(model.parameters(), lr=0.01, foreach=foreach)
        losses = []
        for _ in range(3):
            target = torch.arange(len(inputs), device=device) % 3
            loss = functional.cross_entropy(model(inputs.to(device)), target)
            steps.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
            steps.step()
            losses.append(loss.item())
        return [tensor.cpu() for tensor in model.state_dict().values()], losses

    on_cpu, on_device = train("cpu"), train(DEVICE)
    # Where a gradient is zero but for rounding, Adam's first steps are as large as for any other.
    tolerance = 1e-6 if kind == "attention" else 1e-9
    assert on_device[1] == pytest.approx(on_cpu[1], abs=tolerance)
    if kind != "attention":
        for ours, theirs in zip(on_device[0], on_cpu[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
