"""From a model and a pilot batch to a `Program` and its nodes, checked against the model itself.

The model is recorded twice, in training and in evaluation mode, which must take the same path. Modules whose inside
cannot be recorded are called as a whole; where the outermost forward itself cannot be, the model is one node and the
reason is kept. Before a program is believed it is run on a real batch, and on a smaller one, in both modes: outputs and
buffers must equal the model's own, bit for bit.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hydra_tune.core.errors import HydraTuneError
from hydra_tune.core.random_state import RandomState
from hydra_tune.core.trees import call_model
from hydra_tune.graph.layers import is_leaf
from hydra_tune.graph.module_attributes import attributes_of, restore_attributes
from hydra_tune.graph.program import FAILED_AT, Attribute, Op, Program, Ref, attribute, leaves
from hydra_tune.graph.recorded_trees import holds_tensors
from hydra_tune.graph.recorder import DecidesByContents, NotRecordable, Recorder

logger = logging.getLogger(__name__)

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose gradients of input and weights are products of their own; others compute both at once."""


MOST_CLOSED = 24
"""Most modules that are called as a whole; each costs another recording."""
MOST_RUNS, MOST_SECONDS = 20, 2.0
"""A capture takes at most the time of this many runs of the model, and these seconds."""
TOLERANCE = 1000
"""Difference in multiples of a dtype's epsilon that is allowed to a model recorded as if it were traced."""


@dataclass(frozen=True)
class Node:
    """A run of operations that is never cut: one that has parameters, and those without that follow it."""

    name: str
    start: int
    stop: int
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    layer: int | None = None
    """The operation that has the parameters, where it is a dense or convolutional layer: the gradients of its weights
    can be computed after that of its input, at no extra cost."""


@dataclass(frozen=True)
class Captured:
    """A model's program and nodes; `whole_because` says why a model that is one node could not be cut."""

    program: Program
    nodes: tuple[Node, ...]
    whole_because: str = ""

    @property
    def mixed(self) -> bool:
        """True if operations compute in 16 bits where that does no harm."""
        return self.program.mixed


def capture(model: nn.Module, pilot: Any, batches: Sequence[Any]) -> Captured:
    """Return the program of `model`, recorded with the inputs `pilot` and checked on those of `batches`.

    The pilot only says what comes of what: a few rows will do. With no batches to check on, the program is that of a
    model which is known from before.
    """
    names = _argument_names(model, pilot)
    with untouched(model):
        began = time.perf_counter()
        draws = _draws_outside_torch(model, pilot)
        limit = MOST_SECONDS + MOST_RUNS * (time.perf_counter() - began)
        if draws:
            reason = "its forward draws numbers from Python's or NumPy's generators, which a recording would fix"
        else:
            program, reason = _Search(model, names, pilot, batches, began + limit).program()
            if program is not None:
                return Captured(program, _nodes(program, model))
    op = _the_model(names, by_name=isinstance(pilot, Mapping))
    whole = Program(tuple(names), (op,), (op,), Ref(len(names)))
    return Captured(whole, _nodes(whole, model), whole_because=reason)


class _Search:
    """Looks for a program that does what the model does, with as few modules called as a whole as possible."""

    def __init__(self, model: nn.Module, names: list[str], pilot: Any, batches: Sequence[Any], until: float) -> None:
        self.model, self.names, self.pilot, self.batches, self.until = model, names, pilot, batches, until
        self.closed: set[str] = set()
        self.traced = False
        """True if the model is told that it is traced: it then takes no shortcut that depends on contents."""
        self.within: tuple[str, ...] = ()
        """For each operation of the last recording, the innermost module in whose forward it is."""

    def program(self) -> tuple[Program | None, str]:
        """Return the program; else None, and the reason why there is none: the first that was met."""
        first = ""
        while True:
            program, reason, culprit = self._recorded()
            if program is not None:
                reason, at = _difference(program, self.model, self.batches, exact=not self.traced)
                if not reason:
                    return _sendable(program)
                culprit = _next_to_close(self.model, self.closed) if at is None else self.within[at]
            first = first or (f"{reason} (in {culprit})" if culprit else reason)
            if not culprit or len(self.closed) == MOST_CLOSED:
                return None, first
            if time.perf_counter() > self.until:
                return None, f"{first}, and finding all modules that cannot be cut takes too long"
            logger.info("module %r is not cut inside: %s", culprit, reason)
            self.closed.add(culprit)

    def _recorded(self) -> tuple[Program | None, str, str]:
        """Return the program; else None, the reason, and the module to call as a whole in the next try."""
        found: list[Recorder] = []
        outputs: list[Any] = []
        for training in (True, False):
            recorder = Recorder(self.model, self.closed)
            try:
                with untouched(self.model), _in_mode(self.model, training), _told_traced(self.traced):
                    outputs.append(recorder.record(self._given(), self._called))
            except DecidesByContents as error:
                if self.traced:
                    return None, str(error), recorder.failed_in
                self.traced = True
                return self._recorded()
            except Exception as error:  # user code may raise anything when it is recorded
                return None, _in_words(error), recorder.failed_in
            found.append(recorder)
        one, other = found
        unlike = _first_unlike(one.ops, other.ops)
        if unlike is not None:
            inside = [each.within[unlike] for each in found if unlike < len(each.within)]
            culprit = max(inside, key=lambda name: name.count(".") + bool(name))
            return None, "it does not take the same path in training and in evaluation", culprit
        if list(leaves(outputs[0])) != list(leaves(outputs[1])):
            return None, "it does not give the same outputs in training and in evaluation", ""
        if any(isinstance(leaf, Attribute) for leaf in leaves(outputs[0])):
            return None, "it returns one of its own parameters or buffers", ""
        self.within = tuple(one.within)
        return Program(tuple(self.names), tuple(one.ops), tuple(other.ops), outputs[0]), "", ""

    def _given(self) -> dict[str, Any]:
        """Return the pilot's inputs by name."""
        pilot = self.pilot
        values = [pilot[name] for name in self.names] if isinstance(pilot, Mapping) else pilot
        values = values if isinstance(values, tuple | list) else [values]
        return dict(zip(self.names, values, strict=True))

    def _called(self, given: Mapping[str, Any]) -> Any:
        return call_model(self.model, dict(given) if isinstance(self.pilot, Mapping) else tuple(given.values()))


def _sendable(program: Program) -> tuple[Program | None, str]:
    """Return the program if it can travel to a worker; else None, and the reason."""
    try:
        cloudpickle.dumps(program)
    except Exception as error:  # objects of user code may raise anything
        return None, f"its recording cannot be sent to a worker ({type(error).__name__}: {error})"
    return program, ""


@contextmanager
def _told_traced(told: bool) -> Iterator[None]:
    """Let `torch.jit.is_tracing()` say, within the block, that the model is being traced."""
    jit: Any = torch.jit
    original = jit.is_tracing
    if told:
        jit.is_tracing = lambda: True
    try:
        yield
    finally:
        jit.is_tracing = original


def _draws_outside_torch(model: nn.Module, pilot: Any) -> bool:
    """True if the model's forward draws random numbers that are not torch's."""
    with untouched(model), _in_mode(model, True), torch.no_grad():
        before = RandomState.capture()
        call_model(model, pilot)
        return not before.same_outside_torch(RandomState.capture())


def _the_model(names: Sequence[str], *, by_name: bool) -> Op:
    """Return the whole model as one operation."""
    refs = [Ref(i) for i in range(len(names))]
    return Op("module", "", (), dict(zip(names, refs, strict=True))) if by_name else Op("module", "", tuple(refs))


def _argument_names(model: nn.Module, inputs: Any) -> list[str]:
    """Return the names of the forward's arguments that a batch gives, in order."""
    parameters = inspect.signature(model.forward).parameters
    if isinstance(inputs, Mapping):
        named = [name for name in parameters if name in inputs]
        return [*named, *(name for name in inputs if name not in named)]
    count = len(inputs) if isinstance(inputs, tuple | list) else 1
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [name for name, parameter in parameters.items() if parameter.kind in by_position]
    return [*named, *(f"input {i}" for i in range(len(named), count))][:count]


def _in_words(error: Exception) -> str:
    if isinstance(error, NotRecordable):
        return str(error)
    return error.message if isinstance(error, HydraTuneError) else f"{type(error).__name__}: {error}"


def _first_unlike(ops: Sequence[Op], others: Sequence[Op]) -> int | None:
    """Return the number of the first operation that is another one, or that only one of the two has."""
    for index, (op, other) in enumerate(zip(ops, others, strict=False)):
        if (op.kind, op.target, op.refs(), op.attributes()) != (
            other.kind, other.target, other.refs(), other.attributes()
        ):  # fmt: skip
            return index
    return None if len(ops) == len(others) else min(len(ops), len(others))


def _next_to_close(model: nn.Module, closed: set[str]) -> str:
    """Return the next module to call as a whole when no error names one: the deepest that is still open."""
    still_open = [
        name for name, module in model.named_modules()
        if name and not is_leaf(module) and not _inside(name, closed)
    ]  # fmt: skip
    return max(still_open, key=lambda name: name.count("."), default="")


def _inside(name: str, closed: set[str]) -> bool:
    return any(name == outer or name.startswith(outer + ".") for outer in closed)


def _nodes(program: Program, model: nn.Module) -> tuple[Node, ...]:
    """Group operations into nodes: each one with parameters starts a node, those without belong to the node before."""
    nodes: list[Node] = []
    start, names, label, layer = 0, _Used(), "", None
    first = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    for index, op in enumerate(program.training):
        used = _used_by(op, model, first)
        if used.parameters and names.parameters:
            nodes.append(Node(label, start, index, tuple(names.parameters), tuple(names.buffers), layer))
            start, names, label = index, _Used(), ""
        if used.parameters:
            layer = index if _is_layer(op, model) else None
        label = label if label and not used.parameters else op.label
        names.add(used)
    nodes.append(Node(label, start, len(program), tuple(names.parameters), tuple(names.buffers), layer))
    return tuple(nodes)


def _is_layer(op: Op, model: nn.Module) -> bool:
    """True if an operation calls one of torch's own layers, and not a user's subclass of one."""
    return op.kind == "module" and type(model.get_submodule(str(op.target))) in LAYERS


class _Used:
    """Names of parameters and buffers, each once, in order."""

    def __init__(self) -> None:
        self.parameters: dict[str, None] = {}
        self.buffers: dict[str, None] = {}

    def add(self, other: _Used) -> None:
        self.parameters |= other.parameters
        self.buffers |= other.buffers


def _used_by(op: Op, model: nn.Module, first: Mapping[int, str]) -> _Used:
    """Return the parameters and buffers that an operation uses; a tied parameter goes by the first of its names."""
    used = _Used()
    tensors = [attribute(model, name) for name in op.attributes()]
    if op.kind == "module":
        module = model.get_submodule(str(op.target))
        tensors += [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        if id(tensor) in first:
            kind = used.parameters if isinstance(tensor, nn.Parameter) else used.buffers
            kind[first[id(tensor)]] = None
    return used


def _difference(
    program: Program, model: nn.Module, batches: Sequence[Any], *, exact: bool
) -> tuple[str, int | None]:  # fmt: skip
    """Return in words the difference between program and model on these batches, and the operation that fails.

    The words are empty if there is no difference.
    """
    for training in (True, False):
        # Evaluation takes the same path, by construction: a small batch shows that its constants are right too.
        for inputs in batches if training else batches[-1:]:
            with untouched(model), _in_mode(model, training), torch.no_grad():
                expected = _left(call_model(model, inputs), model)
            with untouched(model), _in_mode(model, training), torch.no_grad():
                values = dict(enumerate(program.bind(inputs)))
                try:
                    program.run(model, values, 0, len(program), training=training)
                    found = _left(program.outputs(values), model)
                except Exception as error:  # a program that fails where the model does not is wrong
                    return _in_words(error), getattr(error, FAILED_AT, None)
            alike = (_same(one, other, exact) for one, other in zip(found, expected, strict=False))
            if len(found) != len(expected) or not all(alike):
                return "its recording gives other outputs", None
    return "", None


def _left(outputs: Any, model: nn.Module) -> list[Any]:
    """Return the results of a run: the leaves of its outputs, and copies of the buffers."""
    return [*_spread(outputs), *(buffer.clone() for buffer in model.buffers())]


def _spread(outputs: Any) -> Iterator[Any]:
    """Yield the leaves of outputs, and of objects among them that have tensors as attributes."""
    for leaf in tree_leaves(outputs):
        if not isinstance(leaf, torch.Tensor) and holds_tensors(leaf):
            yield type(leaf)
            yield from _spread(list(vars(leaf).values()))
        else:
            yield leaf


def _same(one: Any, other: Any, exact: bool) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(one) is type(other) and bool(one == other)
    if one.shape != other.shape:
        return False
    one, other = one.nan_to_num(), other.nan_to_num()
    if exact or not other.is_floating_point() or not other.numel():
        return bool(torch.equal(one, other))
    difference, scale = float((one - other).abs().max()), float(other.abs().max())
    return difference <= TOLERANCE * torch.finfo(other.dtype).eps * scale


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Undo at the end of the block all changes to buffers, modules' attributes and random streams."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    renormed = [module.weight for module in embeddings if module.max_norm is not None]
    weights = [weight.detach().clone() for weight in renormed]
    attributes = attributes_of(model)
    before = RandomState.capture()
    try:
        yield
    finally:
        before.restore()
        restore_attributes(model, attributes)
        with torch.no_grad():
            for name, buffer in buffers.items():
                attribute(model, name).copy_(buffer)
            for weight, earlier in zip(renormed, weights, strict=True):
                weight.copy_(earlier)


@contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
