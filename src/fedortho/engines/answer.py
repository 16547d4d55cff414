"""How a holder of images answers a query: sums over its images and their number, and nothing else."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedortho.data.images import Images, evaluation_batches
from fedortho.devices import flops_of, work_clock
from fedortho.errors import BadData
from fedortho.models.capture import capture
from fedortho.models.classifier import classifier_inputs
from fedortho.models.norms import estimate_norms, norm_sums
from fedortho.models.patch import edit_in_place
from fedortho.models.sites import Site, Structure, trace_structure
from fedortho.models.split import Split, entry_inputs, find_split, run_tail, tail_model
from fedortho.statistics.observe import Observation, key_of, observe
from fedortho.statistics.query import Statistic
from fedortho.statistics.spread import spread_sums
from fedortho.training.loop import fit
from fedortho.training.objectives import LOSSES
from fedortho.training.recipe import Recipe


@dataclass
class AnswerCache:
    """What was computed for one model and is used again."""

    ledger: Observation | None = None
    tails: dict[tuple[object, ...], "CachedTail"] | None = None  # None: nothing is cached
    observed: dict[tuple[object, ...], Observation] | None = None
    images_read: int = 0  # forward passes
    images_trained: int = 0  # forward and backward passes
    tail_flops: float = 0.0  # of candidates, behind the cut
    behind: dict[Split, int] = field(default_factory=dict)  # FLOPs of one image there
    structure: Structure | None = None  # of the network, traced at the first query

    def sites(self, model: nn.Module, shape: tuple[int, int, int], statistic: Statistic) -> list[Site]:
        """The sites that a query means; the network is traced once."""
        if self.structure is None:
            self.structure = trace_structure(model, shape)
        return self.structure.sites(statistic.layers, statistic.edit, statistic.tap)


@dataclass(frozen=True)
class CachedTail:
    """What candidates are tried on: the cut, what these images are there, and what a pass from there on costs."""

    split: Split
    inputs: Tensor
    flops: float


def answer(
    model: nn.Module,
    whole: Images,
    groups: Sequence[Images],
    statistic: Statistic,
    *,
    cache: AnswerCache | None = None,
    device: torch.device | str = "cpu",
) -> list[Observation]:
    """One observation per group of images; `difference` takes two groups and gives their weighted difference."""
    cache = cache or AnswerCache()
    if statistic.kind == "difference":
        forget, retain = (_peaks(model, whole, group, statistic, cache, device) for group in groups)
        return [weighted_difference(forget, retain)]
    found = [ANSWERS[statistic.kind](model, whole, group, statistic, cache, device) for group in groups]
    return found if statistic.by_label else [observation.collapsed() for observation in found]


def weighted_difference(forget: Observation, retain: Observation) -> Observation:
    """The paper's share of one client: its images times (mean of forget − mean of retain); nothing without both."""
    whole = forget.images + retain.images if forget.images and retain.images else 0
    sums = {}
    for key, value in forget.sums.items():
        empty = torch.zeros(1, value.shape[1], dtype=torch.float64)
        sums[key] = whole * (forget.mean(key) - retain.mean(key)).unsqueeze(0) if whole else empty
    return Observation(sums, torch.tensor([whole]), forget.model)


def _peaks(
    model: nn.Module, whole: Images, group: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> Observation:
    """Peaks by label, from the ledger where it knows all images of a label and from the images otherwise."""
    taps = [(site, statistic.tap) for site in cache.sites(model, whole.shape, statistic)]
    keys = [key_of(*tap) for tap in taps]

    def look(images: Images) -> Observation:
        key = (*keys, images.rows.numpy().tobytes())
        if cache.observed is not None and key in cache.observed:
            return cache.observed[key]
        seen = observe(model, images, taps, classes=whole.classes, device=device)
        cache.images_read += len(images)
        if cache.observed is not None:
            cache.observed[key] = seen
        return seen

    ledger = cache.ledger
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


def _tail(
    model: nn.Module, images: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> CachedTail:
    """The network is cut before the first kernel that candidates edit."""
    key = (statistic.layers, statistic.edit, statistic.tap, images.rows.numpy().tobytes())
    if cache.tails is not None and key in cache.tails:
        return cache.tails[key]
    if not len(images):
        raise BadData("there is no image to try candidates on")
    sites = cache.sites(model, images.shape, statistic)
    inputs = _inputs(images, device)
    split = find_split(model, sites, inputs[:2])
    cached = entry_inputs(model, split, inputs)
    if split not in cache.behind:
        with torch.no_grad(), work_clock.stopped():
            cache.behind[split] = flops_of(lambda: run_tail(tail_model(model, split), split, cached[:1]))
    found = CachedTail(split, cached, float(cache.behind[split] * len(images)))
    cache.images_read += len(images)
    if cache.tails is not None:
        cache.tails[key] = found
    return found


def _tried(
    model: nn.Module, images: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> Iterator[tuple[int, nn.Module, CachedTail]]:
    """Every candidate by number, as a cut model of its own, with what it is tried on."""
    for number, patch in enumerate(statistic.patches):
        tail = _tail(model, images, statistic, cache, device)
        cache.tail_flops += tail.flops
        yield number, edit_in_place(tail_model(model, tail.split), patch), tail


def _right(
    model: nn.Module, whole: Images, group: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> Observation:
    """How many answers of each candidate are right, by label."""
    sums = {f"{number}": torch.zeros(whole.classes, 1, dtype=torch.float64) for number in range(len(statistic.patches))}
    if len(group):
        for number, twin, tail in _tried(model, group, statistic, cache, device):
            with torch.no_grad():
                answers = run_tail(twin, tail.split, tail.inputs).argmax(1).cpu()
            right = torch.bincount(group.labels[answers == group.labels], minlength=whole.classes)
            sums[f"{number}"] = right.double().unsqueeze(1)  # on the CPU
    return Observation(sums, torch.bincount(group.labels, minlength=whole.classes))


def _moments(
    model: nn.Module, whole: Images, group: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> Observation:
    """First and second moments of batch-norm inputs, as each candidate's own batch statistics give them."""
    widths = {norm: model.get_buffer(f"{norm}.running_mean").numel() for norm in statistic.norms}
    sums, count = _no_moments(widths, statistic), 0
    if len(group) > 1:  # batch statistics of one image are no statistics
        for number, twin, tail in _tried(model, group, statistic, cache, device):
            buffers, count = estimate_norms(twin, tail.split, statistic.norms, tail.inputs)
            for norm in statistic.norms:
                mean, variance = (buffers[f"{norm}.running_{kind}"].cpu().double() for kind in ("mean", "var"))
                sums[f"{number}:{norm}:mean"] = count * mean.unsqueeze(0)
                sums[f"{number}:{norm}:square"] = count * (variance + mean.square()).unsqueeze(0)
    return Observation(sums, torch.tensor([count]))


def _no_moments(widths: Mapping[str, int], statistic: Statistic) -> dict[str, Tensor]:
    return {
        f"{number}:{norm}:{kind}": torch.zeros(1, width, dtype=torch.float64)
        for number in range(len(statistic.patches))
        for norm, width in widths.items()
        for kind in ("mean", "square")
    }


def _layer(
    model: nn.Module, whole: Images, group: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> Observation:
    """Sums of one batch norm's inputs and of their squares, by each candidate as it is; exact on any partition."""
    (norm,) = statistic.norms
    sums, count = _no_moments({norm: model.get_buffer(f"{norm}.running_mean").numel()}, statistic), 0
    if len(group):
        for number, twin, tail in _tried(model, group, statistic, cache, device):
            total, count = norm_sums(twin, tail.split, norm, tail.inputs)
            sums |= {f"{number}:{norm}:mean": total[:1], f"{number}:{norm}:square": total[1:]}
    return Observation(sums, torch.tensor([count]))


def _classifier(
    model: nn.Module, whole: Images, group: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> Observation:
    """Sums of the classifier's inputs and of their squares, for each candidate."""
    linear = model.get_submodule(statistic.classifier)
    assert isinstance(linear, nn.Linear)
    nothing = torch.zeros(1, linear.in_features, dtype=torch.float64)
    sums = {f"{number}:{kind}": nothing for number in range(len(statistic.patches)) for kind in ("sum", "square")}
    if len(group):
        for number, twin, tail in _tried(model, group, statistic, cache, device):
            given = classifier_inputs(twin, tail.split, statistic.classifier, tail.inputs)
            sums[f"{number}:sum"] = given.sum(0, keepdim=True)
            sums[f"{number}:square"] = given.square().sum(0, keepdim=True)
    return Observation(sums, torch.tensor([len(group)]))


def _derived(reduce: Callable[[Tensor], Tensor]) -> "AnswerFunction":
    def add_up(
        model: nn.Module,
        whole: Images,
        group: Images,
        statistic: Statistic,
        cache: AnswerCache,
        device: torch.device | str,
    ) -> Observation:
        """Sums over batches of what is made of the gradient of a batch's mean loss, parameter by parameter."""
        twin = copy.deepcopy(model).to(device).eval().requires_grad_(True)
        weights = dict(twin.named_parameters())
        sums = {name: torch.zeros(1, weight.numel(), dtype=torch.float64) for name, weight in weights.items()}
        batches = 0
        for inputs, labels in evaluation_batches(group, statistic.batch_size, device):
            loss = LOSSES[statistic.loss](twin(inputs), labels)
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for name, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    sums[name] += reduce(gradient.cpu().double()).reshape(1, -1)  # channels may come last
            batches += 1
        cache.images_trained += len(group)
        return Observation(sums, torch.tensor([batches]))

    return add_up


def _drift(
    model: nn.Module, whole: Images, group: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> Observation:
    """How far one local epoch of plain SGD moves each parameter, ‖p' − p‖₁, times the images it was trained on."""
    images = len(group) if len(group) > 1 else 0  # batch norm cannot train on one
    moved = model
    if images:
        recipe = Recipe(
            epochs=1, batch_size=statistic.batch_size, lr=statistic.lr, schedule="constant", crop=0, flip=0.0, ortho=0.0
        )
        moved = fit(model, group, recipe, device=device)
        cache.images_trained += images
    sums = {}
    for (name, before), after in zip(model.named_parameters(), moved.parameters(), strict=True):
        distance = (after.detach().cpu() - before.detach().cpu()).double().abs().sum()
        sums[name] = (images * distance).view(1, 1)
    return Observation(sums, torch.tensor([images]))


def _averages(
    model: nn.Module, whole: Images, group: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> Observation:
    """Sums over images, by label, of each kernel's mean response over the map, negative responses being 0."""
    sites = cache.sites(model, whole.shape, statistic)
    sums = {site.name: torch.zeros(whole.classes, site.kernels, dtype=torch.float64) for site in sites}
    at = {_tapped(site, statistic.tap): site.name for site in sites}
    with torch.no_grad():
        for inputs, labels in evaluation_batches(group, device=device):
            with capture(model, at, lambda out: out.clamp_min(0).mean((2, 3))) as seen:
                model(inputs)
            for module, means in seen.items():
                sums[at[module]].index_add_(0, labels.cpu(), means[-1].cpu().double())
    cache.images_read += len(group)
    return Observation(sums, torch.bincount(group.labels, minlength=whole.classes))


def _tapped(site: Site, tap: str) -> str:
    """The module whose output is read."""
    layer = site.layers[0]
    return layer.norm if tap != "conv" and layer.norm else layer.name


def _spread(
    model: nn.Module, whole: Images, group: Images, statistic: Statistic, cache: AnswerCache, device: torch.device | str
) -> Observation:
    """How the responses of each site lie: sums by position, of products, and with the model's own answers."""
    cache.images_read += len(group)
    return spread_sums(model, group, cache.sites(model, whole.shape, statistic), device)


AnswerFunction = Callable[[nn.Module, Images, Images, Statistic, AnswerCache, torch.device | str], Observation]
ANSWERS: Mapping[str, AnswerFunction] = {
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
