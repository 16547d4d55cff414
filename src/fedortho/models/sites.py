"""Where a network can be edited: single layers, or all writers of one residual stream together; and where it cannot."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fedortho.errors import BadSetting, unknown
from fedortho.models.capture import capture
from fedortho.models.graph import DEPTHS, TRAINING, Layer, once_per_architecture, select_layers, trace_layers
from fedortho.models.joins import Join, find_joins

EDITS = ("conv", "channel")
DIRECTIONS = "directions"  # the edit that mixes channels: each layer, or each sum of a residual stream, for itself
TAPS = ("conv", "bn", "relu", "stream")


@dataclass(frozen=True)
class Site:
    """Kernels that are ranked and edited as one: channel j of each of these layers."""

    name: str  # of the layer, or of the module whose output is the residual stream
    layers: tuple[Layer, ...]
    kernels: int
    is_stream: bool = False
    beside: str = ""  # what is added to the responses of its layers, see `Join`; none of it is edited


@dataclass(frozen=True)
class Finding:
    """What `check` says of one layer: for each edit, why it does not apply (None: it does)."""

    layer: Layer
    conv: str | None
    channel: str | None
    group: str | None  # for the layers of a residual stream: why they cannot be edited together
    is_undone: bool  # a conv edit here is invisible once batch-norm statistics are re-estimated
    directions: str | None = None  # why its channels cannot be mixed


@dataclass(frozen=True)
class Structure:
    """All convolutions of a network with the edits that apply to them, traced once."""

    findings: tuple[Finding, ...]
    streams: Mapping[str, str]  # layers that write to one residual stream, by commas → the module at its end
    joins: Mapping[str, Join] | None = None  # for each such layer where it is added; None: traced before this was known

    def sites(self, which: str, edit: str, tap: str) -> list[Site]:
        """What an edit of these layers acts on: none if `which` is a depth at which no layer can be edited.

        A layer that cannot be edited is refused by its name, and left out of a depth; where `deep` has no other, it is
        the last stage that has. With tap `stream`, layers that write to a residual stream become one site with all its
        writers, for `directions` one with those that are added in the same place; the others stay single.
        """
        if edit not in (*EDITS, DIRECTIONS):
            raise unknown("edit", edit, EDITS)
        if tap not in TAPS:
            raise unknown("tap", tap, TAPS)
        layers = [finding.layer for finding in self.findings]
        problems, chosen = self.problems(edit, tap), select_layers(layers, which)
        usable = [layer for layer in chosen if layer.name not in problems]
        if len(usable) < len(chosen) and not is_depth(which):
            name = next(layer.name for layer in chosen if layer.name in problems)
            raise BadSetting(f"layer {name} cannot be edited ({edit}): {problems[name]}; see fedortho check")
        if not usable and which == "deep":
            rest = [layer for layer in select_layers(layers, "all") if layer.name not in problems]
            usable = [layer for layer in rest if layer.stage == rest[-1].stage]
        sites: dict[str, Site] = {}
        for layer in usable:
            join = (self.joins or {}).get(layer.name) if edit == DIRECTIONS else None
            if join is not None:
                added = tuple(other for other in layers if other.name in join.layers)
                sites[join.module] = Site(join.module, added, layer.kernels, is_stream=True, beside=join.beside)
            elif tap == "stream" and len(layer.writers) > 1:
                name = self.streams[",".join(layer.writers)]
                writers = tuple(other for other in layers if other.name in layer.writers)
                sites[name] = Site(name, writers, layer.kernels, is_stream=True)
            else:
                sites[layer.name] = Site(layer.name, (layer,), layer.kernels)
        return list(sites.values())

    def problems(self, edit: str, tap: str) -> dict[str, str]:
        """The layers that this edit does not apply to, each with the reason."""
        reasons = {}
        for finding in self.findings:
            is_group = tap == "stream" and len(finding.layer.writers) > 1
            reason = finding.group if is_group else finding.conv if edit == "conv" else finding.channel
            reason = finding.directions if edit == DIRECTIONS else reason
            if reason is not None:
                reasons[finding.layer.name] = reason
        return reasons


@once_per_architecture
def trace_structure(model: nn.Module, shape: tuple[int, int, int]) -> Structure:
    layers = trace_layers(model, shape)
    _refuse_layer_norm(model, shape)
    streams, joins = _find_streams(model, shape, layers), find_joins(model, shape, layers)
    known = [_judge(model, layer, layers, streams) for layer in layers]
    problems = {finding.layer.name: finding.channel or _unmixable(model, finding.layer, joins) for finding in known}
    for join in joins.values():  # layers that are added are mixed together
        problems |= dict.fromkeys(join.layers, next(filter(None, map(problems.get, join.layers)), None))
    return Structure(tuple(replace(each, directions=problems[each.layer.name]) for each in known), streams, joins)


def structure_for(edit: str, model: nn.Module, shape: tuple[int, int, int], kept: Structure | None) -> Structure:
    """What was kept of the network's structure; traced now if nothing was, or nothing of what this edit needs."""
    if kept is None or (edit == DIRECTIONS and kept.joins is None):
        return trace_structure(model, shape)
    return kept


def find_sites(model: nn.Module, shape: tuple[int, int, int], which: str, edit: str, tap: str) -> list[Site]:
    """The sites of a network that is asked for them once; see `Structure.sites`."""
    return trace_structure(model, shape).sites(which, edit, tap)


def is_depth(which: str) -> bool:
    """Whether layers are chosen by depth and not by name."""
    return all(word.strip() in DEPTHS for word in which.split(","))


def _refuse_layer_norm(model: nn.Module, shape: tuple[int, int, int]) -> None:
    """Refuse networks that normalise all channels of a map or a token together, as transformers and ConvNeXt do."""
    kinds = {name: " ".join(kind.__name__ for kind in type(module).mro()) for name, module in model.named_modules()}
    names = [name for name, kind in kinds.items() if "LayerNorm" in kind or "RMSNorm" in kind]  # people write their own
    if not names:
        return
    twin = copy.deepcopy(model).cpu().eval()
    with torch.no_grad(), capture(twin, names, lambda given: given.dim(), inputs=True) as seen:
        twin(torch.zeros(1, *shape))
    if mixing := [name for name, dims in seen.items() if max(dims) > 2]:
        why = "normalises all channels together, so no kernel can be edited alone, as hide, directions and paper do"
        raise BadSetting(f"{mixing[0]} is a LayerNorm, which {why}; {TRAINING}")


def _judge(model: nn.Module, layer: Layer, layers: Sequence[Layer], streams: dict[str, str]) -> Finding:
    problem = layer.problem or _shared(model, layer)
    if not problem and layer.groups == layer.kernels > 1:
        problem = "depthwise: each kernel only filters one channel; edit the layer before it"
    channel, group = problem, None
    if not problem and layer.norm and model.get_submodule(layer.norm).weight is None:
        channel = f"its norm {layer.norm} has no scale to edit (affine=False)"
    if len(layer.writers) > 1:
        others = [problem for x in layers if x.name in layer.writers and (problem := x.problem or _shared(model, x))]
        group = channel or (others[0] if others else None)
        if group is None and ",".join(layer.writers) not in streams:
            group = "no module's output is its residual stream alone, as behind a shortcut without parameters"
    undone = layer.norm_kind in ("BatchNorm2d", "SyncBatchNorm") and not problem
    return Finding(layer, problem, channel, group, undone)


def _unmixable(model: nn.Module, layer: Layer, joins: Mapping[str, Join]) -> str | None:
    """Why a layer cannot answer a linear map of its responses, with other weights and another norm."""
    conv, norm = model.get_submodule(layer.name), model.get_submodule(layer.norm) if layer.norm else None
    if layer.groups > 1:
        return "its kernels are in groups"
    if norm is None and conv.bias is None:
        return "it has neither a bias nor a norm"
    is_plain = isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.weight is not None
    if norm is not None and not is_plain:
        return f"its norm {layer.norm} is no batch norm with scales and running statistics"
    is_added = len(layer.writers) > 1
    return "what is added to it was not found" if is_added and layer.name not in joins else None


def _shared(model: nn.Module, layer: Layer) -> str | None:
    weight = model.get_parameter(f"{layer.name}.weight")
    owners = [name for name, p in model.named_parameters(remove_duplicate=False) if p is weight]
    return f"shares its weights with {owners[1]}" if len(owners) > 1 and owners[0] != owners[1] else None


def _find_streams(model: nn.Module, shape: tuple[int, int, int], layers: Sequence[Layer]) -> dict[str, str]:
    """For each residual group the module whose output is the stream at its end, found by trying.

    Silencing all writers must make that output 0, silencing only the last one must not.
    """
    found = {}
    groups = dict.fromkeys(layer.writers for layer in layers if len(layer.writers) > 1)
    twin = copy.deepcopy(model).cpu().eval() if groups else model
    for group in groups:
        writers = [layer for layer in layers if layer.name in group]
        main = [layer for layer in writers if not layer.is_shortcut] or writers
        parts = main[-1].name.split(".")
        ancestors = [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
        muted = _outputs(twin, shape, writers, ancestors)
        spared = _outputs(twin, shape, [main[-1]], ancestors)
        for name in ancestors:
            out = muted.get(name)
            is_map = out is not None and out.dim() == 4 and out.shape[1] == main[-1].kernels
            if out is not None and is_map and not out.any() and spared[name].any():
                found[",".join(group)] = name
                break
    return found


def _outputs(
    model: nn.Module, shape: tuple[int, int, int], silenced: Sequence[Layer], names: Sequence[str]
) -> dict[str, Tensor]:
    inputs = torch.rand(1, *shape, generator=torch.Generator().manual_seed(0)) + 0.1
    with torch.no_grad(), silent(model, silenced), capture(model, names, lambda out: out) as seen:
        model(inputs)
    return {name: outputs[-1] for name, outputs in seen.items() if isinstance(outputs[-1], Tensor)}


@contextmanager
def silent(model: nn.Module, layers: Iterable[Layer]) -> Iterator[None]:
    """In the block, what leaves these layers, or the norms behind them, is 0."""
    modules = [model.get_submodule(layer.norm or layer.name) for layer in layers]
    handles = [module.register_forward_hook(lambda _, __, out: torch.zeros_like(out)) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
