"""How a holder of images answers a query: sums over its images and their number, and nothing else."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.data.images import Images, evaluation_batches
from fedortho.devices import flops_of, work_clock
from fedortho.errors import BadData
from fedortho.models.classifier import classifier_inputs
from fedortho.models.patch import edit_in_place
from fedortho.models.sites import find_sites
from fedortho.models.split import Cut, cut_model, find_cut, run_tail, tail_inputs
from fedortho.statistics.observe import Observation, key_of, observe
from fedortho.statistics.query import Probe
from fedortho.training.loop import fit
from fedortho.training.objectives import LOSSES
from fedortho.training.recipe import Recipe
from fedortho.unlearning.directions import spread_sums
from fedortho.unlearning.repair import norm_sums, repair


@dataclass
class Memory:
    """What a holder has computed for one model and need not compute again."""

    ledger: Observation | None = None
    tails: dict[tuple[object, ...], "Tail"] | None = None  # None: nothing is remembered
    looked: dict[tuple[object, ...], Observation] | None = None
    images_read: int = 0  # forward passes
    images_trained: int = 0  # forward and backward passes
    tail_flops: float = 0.0  # of candidates, behind the cut
    behind: dict[Cut, int] = field(default_factory=dict)  # FLOPs of one image there


@dataclass(frozen=True)
class Tail:
    """What candidates are tried on: the cut, what these images are there, and what a pass from there on costs."""

    cut: Cut
    inputs: Tensor
    flops: float


def answer(
    model: nn.Module,
    whole: Images,
    groups: Sequence[Images],
    probe: Probe,
    *,
    memory: Memory | None = None,
    device: torch.device | str = "cpu",
) -> list[Observation]:
    """One observation per group of images; `difference` takes two groups and gives their weighted difference."""
    memory = memory or Memory()
    if probe.kind == "difference":
        forget, retain = (_peaks(model, whole, group, probe, memory, device) for group in groups)
        return [weighted_difference(forget, retain)]
    found = [PROBES[probe.kind](model, whole, group, probe, memory, device) for group in groups]
    return found if probe.by_label else [observation.collapsed() for observation in found]


def weighted_difference(forget: Observation, retain: Observation) -> Observation:
    """The paper's share of one client: its images times (mean of forget − mean of retain); nothing without both."""
    whole = forget.images + retain.images if forget.images and retain.images else 0
    sums = {}
    for key, value in forget.sums.items():
        empty = torch.zeros(1, value.shape[1], dtype=torch.float64)
        sums[key] = whole * (forget.mean(key) - retain.mean(key)).unsqueeze(0) if whole else empty
    return Observation(sums, torch.tensor([whole]), forget.model)


def _peaks(
    model: nn.Module, whole: Images, group: Images, probe: Probe, memory: Memory, device: torch.device | str
) -> Observation:
    """Peaks by label, from the ledger where it knows all images of a label and from the images otherwise."""
    taps = [(site, probe.tap) for site in find_sites(model, whole.shape, probe.layers, probe.edit, probe.tap)]
    keys = [key_of(*tap) for tap in taps]

    def look(images: Images) -> Observation:
        key = (*keys, images.rows.numpy().tobytes())
        if memory.looked is not None and key in memory.looked:
            return memory.looked[key]
        seen = observe(model, images, taps, classes=whole.classes, device=device)
        memory.images_read += len(images)
        if memory.looked is not None:
            memory.looked[key] = seen
        return seen

    ledger = memory.ledger
    if ledger is None or any(key not in ledger.sums or key in ledger.stale for key in keys):
        return look(group)
    if not bool(torch.isin(group.rows, whole.rows).all()):  # validation images are in no ledger
        return look(group)
    return _from_ledger(ledger.among(keys), whole, group, look)


def _from_ledger(
    ledger: Observation, whole: Images, group: Images, look: Callable[[Images], Observation]
) -> Observation:
    """Whole labels are lines of the ledger; of the others, the smaller side is looked at: the group or its rest."""
    mine = torch.bincount(group.labels, minlength=whole.classes)
    there = torch.bincount(whole.labels, minlength=whole.classes)
    complete = (mine == ledger.counts) & (mine > 0)
    found = ledger.only(complete.nonzero().flatten().tolist())
    partial = (mine > 0) & ~complete
    if not bool(partial.any()):
        return found
    rest = whole.subset(partial[whole.labels] & ~torch.isin(whole.rows, group.rows))
    labels = partial.nonzero().flatten().tolist()
    if len(rest) < int(mine[partial].sum()) and bool((there == ledger.counts)[partial].all()):
        return found + (ledger.only(labels) - look(rest))
    return found + look(group.subset(partial[group.labels]))


def _inputs(images: Images, device: torch.device | str) -> Tensor:
    return images.normalise(images.pixels[images.rows].to(device))


def _tail(model: nn.Module, images: Images, probe: Probe, memory: Memory, device: torch.device | str) -> Tail:
    """The network is cut before the first kernel that candidates edit."""
    key = (probe.layers, probe.edit, probe.tap, images.rows.numpy().tobytes())
    if memory.tails is not None and key in memory.tails:
        return memory.tails[key]
    if not len(images):
        raise BadData("there is no image to try candidates on")
    sites = find_sites(model, images.shape, probe.layers, probe.edit, probe.tap)
    inputs = _inputs(images, device)
    cut = find_cut(model, sites, inputs[:2])
    remembered = tail_inputs(model, cut, inputs)
    if cut not in memory.behind:
        with torch.no_grad(), work_clock.stopped():
            memory.behind[cut] = flops_of(lambda: run_tail(cut_model(model, cut), cut, remembered[:1]))
    found = Tail(cut, remembered, float(memory.behind[cut] * len(images)))
    memory.images_read += len(images)
    if memory.tails is not None:
        memory.tails[key] = found
    return found


def _tried(
    model: nn.Module, images: Images, probe: Probe, memory: Memory, device: torch.device | str
) -> Iterator[tuple[int, nn.Module, Tail]]:
    """Every candidate by number, as a cut model of its own, with what it is tried on."""
    for number, patch in enumerate(probe.patches):
        tail = _tail(model, images, probe, memory, device)
        memory.tail_flops += tail.flops
        yield number, edit_in_place(cut_model(model, tail.cut), patch), tail


def _right(
    model: nn.Module, whole: Images, group: Images, probe: Probe, memory: Memory, device: torch.device | str
) -> Observation:
    """How many answers of each candidate are right, by label."""
    sums = {f"{number}": torch.zeros(whole.classes, 1, dtype=torch.float64) for number in range(len(probe.patches))}
    if len(group):
        for number, twin, tail in _tried(model, group, probe, memory, device):
            with torch.no_grad():
                answers = run_tail(twin, tail.cut, tail.inputs).argmax(1).cpu()
            right = torch.bincount(group.labels[answers == group.labels], minlength=whole.classes)
            sums[f"{number}"] = right.double().unsqueeze(1)  # on the CPU
    return Observation(sums, torch.bincount(group.labels, minlength=whole.classes))


def _moments(
    model: nn.Module, whole: Images, group: Images, probe: Probe, memory: Memory, device: torch.device | str
) -> Observation:
    """First and second moments of batch-norm inputs, as each candidate's own batch statistics give them."""
    widths = {norm: model.get_buffer(f"{norm}.running_mean").numel() for norm in probe.norms}
    sums, count = _no_moments(widths, probe), 0
    if len(group) > 1:  # batch statistics of one image are no statistics
        for number, twin, tail in _tried(model, group, probe, memory, device):
            buffers, count = repair(twin, tail.cut, probe.norms, tail.inputs)
            for norm in probe.norms:
                mean, variance = (buffers[f"{norm}.running_{kind}"].cpu().double() for kind in ("mean", "var"))
                sums[f"{number}:{norm}:mean"] = count * mean.unsqueeze(0)
                sums[f"{number}:{norm}:square"] = count * (variance + mean.square()).unsqueeze(0)
    return Observation(sums, torch.tensor([count]))


def _no_moments(widths: Mapping[str, int], probe: Probe) -> dict[str, Tensor]:
    return {
        f"{number}:{norm}:{kind}": torch.zeros(1, width, dtype=torch.float64)
        for number in range(len(probe.patches))
        for norm, width in widths.items()
        for kind in ("mean", "square")
    }


def _layer(
    model: nn.Module, whole: Images, group: Images, probe: Probe, memory: Memory, device: torch.device | str
) -> Observation:
    """Sums of one batch norm's inputs and of their squares, by each candidate as it is; exact on any partition."""
    (norm,) = probe.norms
    sums, count = _no_moments({norm: model.get_buffer(f"{norm}.running_mean").numel()}, probe), 0
    if len(group):
        for number, twin, tail in _tried(model, group, probe, memory, device):
            total, count = norm_sums(twin, tail.cut, norm, tail.inputs)
            sums |= {f"{number}:{norm}:mean": total[:1], f"{number}:{norm}:square": total[1:]}
    return Observation(sums, torch.tensor([count]))


def _classifier(
    model: nn.Module, whole: Images, group: Images, probe: Probe, memory: Memory, device: torch.device | str
) -> Observation:
    """Sums of the classifier's inputs and of their squares, for each candidate."""
    linear = model.get_submodule(probe.classifier)
    assert isinstance(linear, nn.Linear)
    nothing = torch.zeros(1, linear.in_features, dtype=torch.float64)
    sums = {f"{number}:{kind}": nothing for number in range(len(probe.patches)) for kind in ("sum", "square")}
    if len(group):
        for number, twin, tail in _tried(model, group, probe, memory, device):
            given = classifier_inputs(twin, tail.cut, probe.classifier, tail.inputs)
            sums[f"{number}:sum"] = given.sum(0, keepdim=True)
            sums[f"{number}:square"] = given.square().sum(0, keepdim=True)
    return Observation(sums, torch.tensor([len(group)]))


def _derived(reduce: Callable[[Tensor], Tensor]) -> "Answer":
    def add_up(
        model: nn.Module, whole: Images, group: Images, probe: Probe, memory: Memory, device: torch.device | str
    ) -> Observation:
        """Sums over batches of what is made of the gradient of a batch's mean loss, parameter by parameter."""
        twin = copy.deepcopy(model).to(device).eval().requires_grad_(True)
        weights = dict(twin.named_parameters())
        sums = {name: torch.zeros(1, weight.numel(), dtype=torch.float64) for name, weight in weights.items()}
        batches = 0
        for inputs, labels in evaluation_batches(group, probe.batch, device):
            loss = LOSSES[probe.loss](twin(inputs), labels)
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for name, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    sums[name] += reduce(gradient.cpu().double()).reshape(1, -1)  # channels may come last
            batches += 1
        memory.images_trained += len(group)
        return Observation(sums, torch.tensor([batches]))

    return add_up


def _drift(
    model: nn.Module, whole: Images, group: Images, probe: Probe, memory: Memory, device: torch.device | str
) -> Observation:
    """How far one local epoch of plain SGD moves each parameter, ‖p' − p‖₁, times the images it was trained on."""
    images = len(group) if len(group) > 1 else 0  # batch norm cannot train on one
    moved = model
    if images:
        recipe = Recipe(epochs=1, batch=probe.batch, rate=probe.rate, schedule="constant", crop=0, flip=0.0, ortho=0.0)
        moved = fit(model, group, recipe, device=device)
        memory.images_trained += images
    sums = {}
    for (name, before), after in zip(model.named_parameters(), moved.parameters(), strict=True):
        distance = (after.detach().cpu() - before.detach().cpu()).double().abs().sum()
        sums[name] = (images * distance).view(1, 1)
    return Observation(sums, torch.tensor([images]))


def _averages(
    model: nn.Module, whole: Images, group: Images, probe: Probe, memory: Memory, device: torch.device | str
) -> Observation:
    """Sums over images, by label, of each kernel's mean response over the map, negative responses being 0."""
    sites = find_sites(model, whole.shape, probe.layers, probe.edit, probe.tap)
    sums = {site.name: torch.zeros(whole.classes, site.kernels, dtype=torch.float64) for site in sites}
    seen: dict[str, Tensor] = {}
    handles = []
    for site in sites:
        at = site.layers[0].norm if probe.tap != "conv" and site.layers[0].norm else site.layers[0].name

        def keep(_: nn.Module, __: Any, out: Tensor, name: str = site.name) -> None:
            seen[name] = out.clamp_min(0).mean((2, 3))  # here, before an in-place activation can change `out`

        handles.append(model.get_submodule(at).register_forward_hook(keep))
    try:
        with torch.no_grad():
            for inputs, labels in evaluation_batches(group, device=device):
                model(inputs)
                for name, means in seen.items():
                    sums[name].index_add_(0, labels.cpu(), means.cpu().double())
    finally:
        for handle in handles:
            handle.remove()
    memory.images_read += len(group)
    return Observation(sums, torch.bincount(group.labels, minlength=whole.classes))


def _spread(
    model: nn.Module, whole: Images, group: Images, probe: Probe, memory: Memory, device: torch.device | str
) -> Observation:
    """How the responses of each site lie: sums by position, of products, and with the model's own answers."""
    memory.images_read += len(group)
    return spread_sums(model, group, find_sites(model, whole.shape, probe.layers, probe.edit, probe.tap), device)


Answer = Callable[[nn.Module, Images, Images, Probe, Memory, torch.device | str], Observation]
PROBES: Mapping[str, Answer] = {
    "peaks": _peaks,
    "right": _right,
    "moments": _moments,
    "layer": _layer,
    "inputs": _classifier,
    "averages": _averages,
    "spread": _spread,
    "drift": _drift,
    "fisher": _derived(Tensor.square),
    "fisher-abs": _derived(Tensor.abs),
    "gradient": _derived(lambda gradient: gradient),
}
