"""What a network is made of: its convolutions in forward order, the norm behind each, and what they share.

One traced forward pass gives the order; Torch-Pruning's dependency graph finds the layers that must be
edited together. What it cannot follow is reported in `Layer.problem`, never guessed.
"""

import copy
import fnmatch
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fedortho.errors import BadSetting, cannot_read, unknown
from fedortho.models.capture import capture

NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d, nn.LayerNorm, nn.SyncBatchNorm)
WEIGHTED = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)  # they make new channels
DEPTHS = ("shallow", "mid", "deep", "all")
TRAINING = "a method that trains, such as finetune or salun, can serve it, and so can retraining"


@dataclass(frozen=True)
class Layer:
    """One convolution as the network uses it."""

    name: str
    kernels: int  # output channels
    inputs: int  # input channels per group, times the kernel's area
    groups: int
    size: tuple[int, int]  # height and width of its output
    norm: str | None  # the norm that reads its output directly
    norm_kind: str | None  # that norm's class
    writers: tuple[str, ...]  # convolutions that add into the same residual stream, itself included
    is_shortcut: bool  # on a side path: the shorter way round a residual block, or a gate
    stage: int  # 0 for the first; see `trace_layers`
    problem: str | None  # why it cannot be treated, if so


Traced = TypeVar("Traced")
Trace = Callable[[nn.Module, tuple[int, int, int]], Traced]
PLAIN = (bool, int, float, str, type(None), torch.dtype, type, FunctionType, BuiltinFunctionType)
MOST_TRACES = 64


def once_per_architecture(trace: Trace[Traced]) -> Trace[Traced]:
    """The function with a memory: networks that differ in their weights only, as those of clients, are traced once."""
    known: dict[tuple[object, ...], Traced] = {}

    @functools.wraps(trace)
    def traced(model: nn.Module, shape: tuple[int, int, int]) -> Traced:
        architecture = architecture_of(model)
        if architecture is None:
            return trace(model, shape)
        if (architecture, shape) not in known:
            if len(known) == MOST_TRACES:
                known.clear()
            known[architecture, shape] = trace(model, shape)
        return copy.copy(known[architecture, shape])

    return traced


def architecture_of(model: nn.Module) -> tuple[object, ...] | None:
    """What a network is apart from its weights; None if a module has attributes that cannot be compared."""
    parts: list[object] = []
    common = vars(nn.Module())
    for name, module in model.named_modules(remove_duplicate=False):
        attributes = [(key, value) for key, value in vars(module).items() if key not in common]
        rows = [(key, *(value if isinstance(value, tuple | list) else [value])) for key, value in attributes]
        if not all(isinstance(value, PLAIN) for _, *values in rows for value in values):
            return None
        parts.append((name, type(module), *rows))
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    ids = [id(tensor) for _, tensor in tensors]  # shared weights have one
    return (*parts, *((name, tensor.shape, ids.index(id(tensor))) for name, tensor in tensors))


@once_per_architecture
def trace_layers(model: nn.Module, shape: tuple[int, int, int]) -> list[Layer]:
    """Every convolution in the order in which a forward pass reaches it.

    A stage is a run of main-path layers with outputs of one size; a 1x1 convolution belongs to the
    layer that it feeds, so that a bottleneck is not torn apart.
    """
    twin = copy.deepcopy(model).cpu().eval().requires_grad_(True)
    example = torch.zeros(2, *shape)
    calls = _record_calls(twin, example)
    if not calls:
        raise BadSetting(f"the model has no 2d convolution that a forward pass reaches, nothing to edit; {TRAINING}")
    graph = _dependencies(twin, example, list(calls))
    convs = {name: module for name, module in twin.named_modules() if isinstance(module, nn.Conv2d)}
    layers = []
    for name, sizes in calls.items():
        norm, writers, problem = graph.norms.get(name), graph.writers.get(name), graph.failure
        if problem is None and len(sizes) > 1:
            problem = f"runs {len(sizes)} times in one pass"
        elif problem is None and writers is None:
            problem = "its structure could not be traced: no gradient flows through it"
        elif problem is None and name in graph.foreign:
            problem = f"{graph.foreign[name]} writes into the same residual stream"
        known = replace(_unreached(name, convs[name]), size=sizes[0], writers=writers or (name,), problem=problem)
        kind = type(twin.get_submodule(norm)).__name__ if norm else None
        layers.append(replace(known, norm=norm, norm_kind=kind, is_shortcut=name in graph.aside))
    pointwise = {name for name in calls if convs[name].kernel_size == (1, 1)}
    return _with_stages(layers, pointwise) + [_unreached(n, conv) for n, conv in convs.items() if n not in calls]


def weighted_order(model: nn.Module, shape: tuple[int, int, int]) -> list[str]:
    """Convolutions, linear layers and norms in the order in which a forward pass reaches them."""
    names = [name for name, module in model.named_modules() if isinstance(module, (*WEIGHTED, *NORMS))]
    twin = copy.deepcopy(model).cpu().eval()
    with torch.no_grad(), capture(twin, names, lambda out: None) as calls:
        twin(torch.zeros(2, *shape))
    return list(calls)


def stage_entries(model: nn.Module, shape: tuple[int, int, int]) -> list[str]:
    """The first main-path convolution of every stage but the first: it receives the output of the stage before."""
    first: dict[int, str] = {}
    for layer in trace_layers(model, shape):
        if not layer.is_shortcut and layer.stage > 0:
            first.setdefault(layer.stage, layer.name)
    return list(first.values())


def _unreached(name: str, conv: nn.Conv2d) -> Layer:
    sizes = (conv.out_channels, conv.weight[0].numel(), conv.groups, (0, 0))
    return Layer(name, *sizes, None, None, (name,), False, -1, "no forward pass reaches it")


@dataclass(frozen=True)
class _Graph:
    """What the dependency graph says of the convolutions, by name."""

    norms: dict[str, str]
    writers: dict[str, tuple[str, ...]]  # those found in the graph, each with its fellows
    aside: frozenset[str]
    foreign: dict[str, str]  # what else writes into a convolution's stream
    failure: str | None = None


def _record_calls(model: nn.Module, example: Tensor) -> dict[str, list[tuple[int, int]]]:
    """The convolutions in the order of their first calls, with the size of the output at each call."""
    convs = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    try:
        with torch.no_grad(), capture(model, convs, lambda out: (out.shape[2], out.shape[3])) as seen:
            model(example)
    except Exception as error:  # a foreign model: it may fail in any way
        raise cannot_read(example.shape[1:], error) from error
    return seen


def _dependencies(model: nn.Module, example: Tensor, names: list[str]) -> _Graph:
    import torch_pruning as tp

    try:
        graph = tp.DependencyGraph().build_dependency(model, example_inputs=example, verbose=False)
    except Exception as error:  # a foreign tracer on a foreign model: any failure means "not known"
        return _Graph({}, {}, frozenset(), {}, f"its structure could not be traced ({type(error).__name__}: {error})")
    name_of = {module: name for name, module in model.named_modules()}
    nodes = {name: graph.module2node.get(model.get_submodule(name)) for name in names}
    norms = {}
    for name, node in nodes.items():
        readers = [] if node is None else [reader.module for reader in node.outputs]
        if len(readers) == 1 and isinstance(readers[0], NORMS):
            norms[name] = name_of[readers[0]]
    streams: list[set[str]] = []
    aside: set[str] = set()
    for node in graph.module2node.values():
        if len(node.inputs) > 1 and _operation(node) in ("Add", "Sub", "Mul"):
            aside |= _side_path(node, name_of)
            if _operation(node) != "Mul":
                new = {_label(source, name_of) for source in _sources(node)}
                joined = new.union(*(stream for stream in streams if stream & new))
                streams = [*(stream for stream in streams if not stream & new), joined]
    writers: dict[str, tuple[str, ...]] = {name: (name,) for name, node in nodes.items() if node is not None}
    foreign = {}
    for stream in streams:
        known = tuple(name for name in names if name in stream)
        others = sorted(stream - set(names))
        widths = {name: model.get_submodule(name).out_channels for name in known}
        for name in known:  # behind a shortcut that pads or slices channels, other channels meet
            writers[name] = tuple(other for other in known if widths[other] == widths[name])
            if others:
                foreign[name] = others[0]
    return _Graph(norms, writers, frozenset(aside), foreign)


def _operation(node: Any) -> str:
    """Add, Mul, Cat and so on; empty for a module."""
    is_module = isinstance(node.module, (*WEIGHTED, *NORMS))
    return "" if is_module else re.sub("Backward.*", "", getattr(node.grad_fn, "name", str)())


def _label(node: Any, name_of: dict[nn.Module, str]) -> str:
    name = name_of.get(node.module)
    if isinstance(node.module, nn.Conv2d):
        return str(name)
    return f"{name} ({type(node.module).__name__})" if name else f"a {_operation(node).lower()}"


def _upstream(node: Any) -> set[Any]:
    """The node and all that it depends on."""
    seen, waiting = set(), [node]
    while waiting:
        now = waiting.pop()
        if now not in seen:
            seen.add(now)
            waiting += now.inputs
    return seen


def _side_path(join: Any, name_of: dict[nn.Module, str]) -> set[str]:
    """Convolutions on the shorter branches of a sum, or on the branch of a product that only scales the other."""
    reached = [_upstream(node) for node in dict.fromkeys(join.inputs)]
    own = []
    for branch in reached:
        rest = set[Any]().union(*(other for other in reached if other is not branch))
        own.append({name_of[node.module] for node in branch - rest if isinstance(node.module, nn.Conv2d)})
    if _operation(join) == "Mul":
        is_gate = len(own) > 1 and not all(own) and set.intersection(*reached)
        return set[str]().union(*own) if is_gate else set()
    longest = max(map(len, own))
    return set[str]().union(*(branch for branch in own if len(branch) < longest))


def _sources(join: Any) -> set[Any]:
    """The nodes whose output, but for norms and the like, is what a sum adds up; gates are not among them."""
    found, seen, waiting = set(), set(), list(join.inputs)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node.module, WEIGHTED) or _operation(node) == "Cat":
            found.add(node)
        elif _operation(node) == "Mul" and len(node.inputs) > 1:
            ahead = [source for source in node.inputs if any(source in _upstream(x) - {x} for x in node.inputs)]
            waiting += ahead or node.inputs
        else:
            waiting += node.inputs
    return found


def _with_stages(layers: list[Layer], pointwise: set[str]) -> list[Layer]:
    main = [layer for layer in layers if not layer.is_shortcut]
    sizes = [max(later.size for later in main[index:]) for index in range(len(main))]  # sizes never grow again
    for index, layer in enumerate(main[:-1]):
        if layer.name in pointwise and len(layer.writers) == 1:  # one that writes into a stream ends its block
            sizes[index] = min(sizes[index], sizes[index + 1])
    stages, stage = {}, 0
    for index, layer in enumerate(main):
        stage += index > 0 and sizes[index] != sizes[index - 1]
        stages[layer.name] = stage
    seen, numbered = 0, []
    for layer in layers:  # a shortcut belongs to the block it passes by, which it may run before
        seen = stages.get(layer.name, seen)
        added = [other for other in main if layer.is_shortcut and other.name in layer.writers]
        beside = [other for other in added if other.size == layer.size] or added  # a stream may cross stages
        numbered.append(replace(layer, stage=stages[beside[0].name] if beside else seen))
    return numbered


def select_layers(layers: Sequence[Layer], which: str) -> list[Layer]:
    """The layers that the words of `which` name, with commas between: depths, names, patterns; in forward order.

    Such as `deep`, `layer4.*.conv2`, `re:conv[12]$`. Depths leave out shortcuts: `shallow` is the first stage, `deep`
    the last, `mid` what is between. Networks of fewer than three stages are cut into thirds instead.
    """
    names = set[str]().union(*(_named(layers, word.strip()) for word in which.split(",")))
    return [layer for layer in layers if layer.name in names]


def _named(layers: Sequence[Layer], word: str) -> set[str]:
    if word in DEPTHS:
        return _at_depth(layers, word)
    if word.startswith("re:"):
        try:
            pattern = re.compile(word[3:])
        except re.error as error:
            raise BadSetting(f"{word!r} is not a regular expression: {error}") from error
        found = {layer.name for layer in layers if pattern.search(layer.name)}
    else:
        found = {layer.name for layer in layers if fnmatch.fnmatchcase(layer.name, word)}
    if not found:
        raise unknown("layer", word, [*DEPTHS, *(layer.name for layer in layers)])
    return found


def _at_depth(layers: Sequence[Layer], depth: str) -> set[str]:
    main = [layer for layer in layers if not layer.is_shortcut and layer.stage >= 0]
    if not main:
        raise BadSetting(f"no convolution lies on the main path, so there is no {depth!r} part; name the layers")
    last, third = main[-1].stage, max(len(main) // 3, 1)
    if last >= 2:
        stages = {"shallow": {0}, "mid": {*range(1, last)}, "deep": {last}, "all": {*range(last + 1)}}[depth]
        chosen = [layer for layer in main if layer.stage in stages]
    else:
        ends = {"shallow": (0, third), "mid": (third, -third), "deep": (-third, None), "all": (0, None)}[depth]
        chosen = main[slice(*ends)]
    if not chosen:
        raise BadSetting(f"the model has {len(main)} main-path convolutions, too few for a {depth!r} part; name them")
    return {layer.name for layer in chosen}
