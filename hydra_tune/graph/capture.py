"""From a model and a pilot batch to a `Program` and its nodes, checked against the model itself.

The model is recorded twice, in training and in evaluation mode, since an exported or traced graph has its mode baked
in. Modules whose inside cannot be recorded are called as a whole; where the outermost forward itself cannot be, the
model is one node and the reason is kept. Before a program is believed it is run on a real batch, and on a smaller one,
in both modes: outputs and buffers must equal the model's own, bit for bit.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from hydra_tune.core.random_state import RandomState
from hydra_tune.core.trees import call_model
from hydra_tune.graph.program import Attribute, Op, Program, Ref, attribute, leaves, program_inputs, shapes_of
from hydra_tune.graph.tracer import Tracer, attributes_of, restore_attributes

logger = logging.getLogger(__name__)

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers whose gradients of input and weights are products of their own; others compute both at once."""


MOST_CLOSED = 24
"""Most modules that are called as a whole; each costs another recording."""


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

    The pilot only says what shapes come of what: a few rows will do. With no batches to check on, the program is that
    of a model which is known from before.
    """
    names = _argument_names(model, pilot)
    with untouched(model):
        opaque: set[str] = set()
        reason = ""
        if _draws_outside_torch(model, pilot):
            reason = "its forward draws numbers from Python's or NumPy's generators, which a recording would fix"
        while not reason:
            program, reason, culprit = _record_both(model, names, pilot, opaque)
            if program is not None:
                reason = _difference(program, model, batches)
                if not reason:
                    return Captured(program, _nodes(program, model))
                culprit = _next_to_close(model, opaque)
            if not culprit or len(opaque) == MOST_CLOSED:
                break
            logger.info("module %r is not cut inside: %s", culprit, reason)
            opaque.add(culprit)
            reason = ""
    op = _the_model(names, by_name=isinstance(pilot, Mapping))
    whole = Program(tuple(names), (op,), (op,), Ref(len(names)))
    return Captured(whole, _nodes(whole, model), whole_because=reason)


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


def _record_both(model: nn.Module, names: list[str], pilot: Any, opaque: set[str]) -> tuple[Program | None, str, str]:
    """Return the program; else None, the reason, and the module to call as a whole in the next try."""
    found: list[tuple[tuple[Op, ...], Any]] = []
    fixed = False
    for training in (True, False):
        with untouched(model), _in_mode(model, training):
            tracer = Tracer(opaque)
            try:
                found.append(_translate(tracer.record(model, *_arguments(model, names, pilot)), names))
            except Exception as error:  # noqa: BLE001 - user code may raise anything when it is recorded
                return None, _in_words(error), tracer.failed_in
            fixed |= tracer.depends_on_shapes
    (ops, output), (evaluation, other) = found
    unlike = _first_unlike(ops, evaluation)
    if unlike is not None or output != other:
        return None, "it does not take the same path in training and in evaluation", _next_to_close(model, opaque)
    if any(isinstance(leaf, Attribute) for leaf in leaves(output)):
        return None, "it returns one of its own parameters or buffers", ""
    shapes = shapes_of(program_inputs(pilot)) if fixed else None
    return Program(tuple(names), ops, evaluation, output, shapes=shapes), "", ""


def _in_words(error: Exception) -> str:
    """Say why a forward cannot be recorded; torch.fx speaks of code objects where a decorator hides the arguments."""
    if "co_varnames" in str(error) or "after ** must be a mapping" in str(error):
        return "its forward is wrapped by a decorator, which hides its arguments from a recording"
    return f"{type(error).__name__}: {error}"


def _arguments(model: nn.Module, names: list[str], pilot: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    values = [pilot[name] for name in names] if isinstance(pilot, Mapping) else pilot
    given = dict(zip(names, values if isinstance(values, tuple | list) else [values], strict=True))
    parameters = inspect.signature(model.forward).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.name not in given and p.default is not p.empty}
    return given, defaults


def _translate(graph: fx.Graph, names: Sequence[str]) -> tuple[tuple[Op, ...], Any]:
    """Return torch.fx's graph as plain operations; parameters and buffers are named where they are used."""
    stands_for: dict[fx.Node, Any] = {}
    ops: list[Op] = []
    output: Any = None
    for node in graph.nodes:
        args, kwargs = (fx.node.map_arg(each, stands_for.__getitem__) for each in (node.args, node.kwargs))
        if node.op == "placeholder":
            # Arguments that keep their defaults have a placeholder too; nothing uses it.
            stands_for[node] = Ref(names.index(node.target)) if node.target in names else None
        elif node.op == "get_attr":
            stands_for[node] = Attribute(node.target)
        elif node.op == "output":
            output = _plain(args[0])
        elif node.target is not torch._assert:
            kind = {"call_module": "module", "call_method": "method", "call_function": "function"}[node.op]
            ops.append(Op(kind, node.target, _plain(args), _plain(kwargs)))
            stands_for[node] = Ref(len(names) + len(ops) - 1)
    return tuple(ops), output


def _plain(tree: Any) -> Any:
    """Return a tree with torch.fx's immutable lists and dicts replaced by ordinary ones."""
    if isinstance(tree, tuple) and not hasattr(tree, "_fields"):
        return tuple(_plain(each) for each in tree)
    if isinstance(tree, list):
        return [_plain(each) for each in tree]
    if isinstance(tree, Mapping):
        return {key: _plain(each) for key, each in tree.items()}
    return tree


def _first_unlike(ops: Sequence[Op], others: Sequence[Op]) -> int | None:
    if len(ops) != len(others):
        return min(len(ops), len(others))
    for index, (op, other) in enumerate(zip(ops, others, strict=True)):
        if (op.kind, op.target, op.refs(), op.attributes()) != (
            other.kind, other.target, other.refs(), other.attributes()
        ):  # fmt: skip
            return index
    return None


def _next_to_close(model: nn.Module, opaque: set[str]) -> str:
    """Return the next module to call as a whole when no error names one: the deepest that is still open."""
    tracer = fx.Tracer()
    still_open = [
        name for name, module in model.named_modules()
        if name and not tracer.is_leaf_module(module, name) and not _inside(name, opaque)
    ]  # fmt: skip
    return max(still_open, key=lambda name: name.count("."), default="")


def _inside(name: str, opaque: set[str]) -> bool:
    return any(name == outer or name.startswith(outer + ".") for outer in opaque)


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


def _difference(program: Program, model: nn.Module, batches: Sequence[Any]) -> str:
    """Return in words the difference between program and model on these batches; empty if there is none."""
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
                except Exception as error:  # noqa: BLE001 - a program that fails where the model does not is wrong
                    return f"{type(error).__name__}: {error}"
            if len(found) != len(expected) or not all(map(_same, found, expected)):
                return "its recording gives other outputs"
    return ""


def _left(outputs: Any, model: nn.Module) -> list[Any]:
    """Return the results of a run: the leaves of its outputs, and copies of the buffers."""
    return [*tree_flatten(outputs)[0], *(buffer.clone() for buffer in model.buffers())]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and bool(torch.equal(one.nan_to_num(), other.nan_to_num()))
    return type(one) is type(other) and bool(one == other)


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
