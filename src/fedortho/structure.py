"""What a network is made of: its convolutions in forward order, the norm behind each, and what they share.

One traced forward pass gives the order; Torch-Pruning's dependency graph finds the layers that must be
edited together. What it cannot follow is reported in `Layer.problem`, never guessed.
"""

import copy
import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.errors import BadSetting, UnknownName, unknown

NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d, nn.LayerNorm, nn.SyncBatchNorm)
DEPTHS = ("shallow", "mid", "deep", "all")


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
    is_shortcut: bool  # on the side path of a residual block
    stage: int  # 0 for the first; see `trace_layers`
    problem: str | None  # why it cannot be treated, if so

    @property
    def is_tall(self) -> bool:
        return self.kernels // self.groups > self.inputs


Select = str | Sequence[str] | Callable[[Layer], bool]


def trace_layers(model: nn.Module, shape: tuple[int, int, int]) -> list[Layer]:
    """Every convolution in the order in which a forward pass reaches it.

    A stage is a run of main-path layers with outputs of one size; a 1x1 convolution belongs to the
    layer that it feeds, so that a bottleneck is not torn apart.
    """
    twin = copy.deepcopy(model).cpu().eval().requires_grad_(True)
    example = torch.zeros(2, *shape)
    calls = _record_calls(twin, example)
    if not calls:
        raise BadSetting("the model has no 2d convolution that a forward pass reaches; there is nothing to treat")
    norms, writers, failure = _dependencies(twin, example, list(calls))
    inputs = [call.input for call in calls.values()]
    layers = []
    for name, call in calls.items():
        conv = twin.get_submodule(name)
        assert isinstance(conv, nn.Conv2d)
        together = writers.get(name, (name,))
        branches = sum(call.input is other for other in inputs) > 1
        norm = norms.get(name)
        layers.append(
            Layer(
                name=name,
                kernels=conv.out_channels,
                inputs=conv.weight[0].numel(),
                groups=conv.groups,
                size=call.size,
                norm=norm,
                norm_kind=type(twin.get_submodule(norm)).__name__ if norm else None,
                writers=together,
                is_shortcut=branches and len(together) > 1,
                stage=0,
                problem=failure or _problem(call, name in writers),
            )
        )
    reached = set(calls)
    unused = [n for n, m in twin.named_modules() if isinstance(m, nn.Conv2d) and n not in reached]
    pointwise = {n for n in calls if _kernel_area(twin, n) == 1}
    return _with_stages(layers, pointwise) + [_unreached(n, twin.get_submodule(n)) for n in unused]


def _problem(call: "_Call", is_traced: bool) -> str | None:
    if call.times > 1:
        return f"runs {call.times} times in one pass"
    return None if is_traced else "its structure could not be traced: no gradient flows through it"


@dataclass
class _Call:
    input: Tensor
    size: tuple[int, int]
    times: int = 1


def _record_calls(model: nn.Module, example: Tensor) -> dict[str, _Call]:
    calls: dict[str, _Call] = {}

    def hook(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            if name in calls:
                calls[name].times += 1
            else:
                calls[name] = _Call(given[0], (out.shape[2], out.shape[3]))

        return note

    handles = [m.register_forward_hook(hook(n)) for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    try:
        with torch.no_grad():
            model(example)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise BadSetting(f"the model cannot read images of {'x'.join(map(str, example.shape[1:]))}: {text}") from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _dependencies(
    model: nn.Module, example: Tensor, names: list[str]
) -> tuple[dict[str, str], dict[str, tuple[str, ...]], str | None]:
    """For each convolution its direct norm and its fellow writers; third, why the graph could not be had."""
    import torch_pruning as tp

    try:
        graph = tp.DependencyGraph().build_dependency(model, example_inputs=example, verbose=False)
    except Exception as error:  # a foreign tracer on a foreign model: any failure means "not known"
        return {}, {}, f"its structure could not be traced ({type(error).__name__}: {error})"
    name_of = {module: name for name, module in model.named_modules()}
    norms: dict[str, str] = {}
    writers: dict[str, tuple[str, ...]] = {}
    for name in names:
        conv = model.get_submodule(name)
        node = graph.module2node.get(conv)
        if node is None:
            continue  # reported by the caller: it is missing in `writers`
        readers = [reader.module for reader in node.outputs]
        if len(readers) == 1 and isinstance(readers[0], NORMS):
            norms[name] = name_of[readers[0]]
        writers[name] = _fellow_writers(graph, tp, conv, name_of, names)
    return norms, writers, None


def _fellow_writers(
    graph: Any, tp: Any, conv: nn.Module, name_of: dict[nn.Module, str], order: list[str]
) -> tuple[str, ...]:
    prune = tp.prune_depthwise_conv_out_channels if _is_depthwise(conv) else tp.prune_conv_out_channels
    group = graph.get_pruning_group(conv, prune, idxs=[0])
    found = {name_of[conv]}
    for dependency, _ in group:
        module = dependency.target.module
        if (
            isinstance(module, nn.Conv2d)
            and not _is_depthwise(module)
            and graph.is_out_channel_pruning_fn(dependency.handler)
        ):
            found.add(name_of[module])
    return tuple(name for name in order if name in found)


def _kernel_area(model: nn.Module, name: str) -> int:
    conv = model.get_submodule(name)
    assert isinstance(conv, nn.Conv2d)
    return conv.kernel_size[0] * conv.kernel_size[1]


def _is_depthwise(conv: nn.Module) -> bool:
    return isinstance(conv, nn.Conv2d) and conv.groups == conv.out_channels > 1


def _unreached(name: str, conv: nn.Module) -> Layer:
    assert isinstance(conv, nn.Conv2d)
    number, inputs = conv.out_channels, conv.weight[0].numel()
    return Layer(
        name, number, inputs, conv.groups, (0, 0), None, None, (name,), False, -1, "no forward pass reaches it"
    )


def _with_stages(layers: list[Layer], pointwise: set[str]) -> list[Layer]:
    main = [layer for layer in layers if not layer.is_shortcut]
    sizes = [layer.size for layer in main]
    for index, layer in enumerate(main[:-1]):
        if layer.name in pointwise:
            sizes[index] = min(layer.size, main[index + 1].size)
    stages, stage = {}, 0
    for index, layer in enumerate(main):
        stage += index > 0 and sizes[index] != sizes[index - 1]
        stages[layer.name] = stage
    seen, numbered = 0, []
    for layer in layers:
        seen = stages.get(layer.name, seen)  # a shortcut belongs to the block it passes by
        numbered.append(replace(layer, stage=seen))
    return numbered


def select_layers(layers: Sequence[Layer], which: Select) -> list[Layer]:
    """The layers that `which` names: a depth, names or patterns, or a predicate; in forward order.

    Text may hold several words, separated by commas: `deep`, `layer4.*.conv2`, `re:conv[12]$`.
    Depths leave out shortcuts: `shallow` is the first stage, `deep` the last, `mid` what is between.
    Networks of fewer than three stages are cut into thirds instead.
    """
    if callable(which):
        chosen = [layer for layer in layers if which(layer)]
        if not chosen:
            raise UnknownName("the given function selects none of the layers: " + ", ".join(x.name for x in layers))
        return chosen
    words = [word.strip() for word in which.split(",")] if isinstance(which, str) else list(which)
    names: set[str] = set()
    for word in words:
        names |= _named(layers, word)
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
    last = main[-1].stage
    if depth == "all":
        chosen = main
    elif last >= 2:
        wanted = {"shallow": {0}, "mid": set(range(1, last)), "deep": {last}}[depth]
        chosen = [layer for layer in main if layer.stage in wanted]
    else:
        third = max(len(main) // 3, 1)
        cut = {"shallow": slice(0, third), "mid": slice(third, len(main) - third), "deep": slice(-third, None)}[depth]
        chosen = main[cut]
    if not chosen:
        raise BadSetting(f"the model has {len(main)} main-path convolutions, too few for a {depth!r} part; name them")
    return {layer.name for layer in chosen}
