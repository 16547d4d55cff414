"""How a holder of images answers a query: sums over its images and their number, and nothing else."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Images, evaluation_batches
from fedortho.devices import FlopCounter, sum_dtype
from fedortho.engines.cost import flops_per_image
from fedortho.engines.engine import Tally
from fedortho.engines.query import STATISTICS, Statistic
from fedortho.models.capture import capture
from fedortho.models.norms import estimate_norms, norm_sums
from fedortho.models.patch import Patch, edit_in_place
from fedortho.models.sites import DIRECTIONS, Site, structure_for
from fedortho.models.split import Split, classifier_inputs, find_split, image_activations, run_tail, tail_model
from fedortho.statistics.gram import gram_sums
from fedortho.statistics.observe import Kept, Observation, key_of, observe, steady_order, weighted_difference
from fedortho.statistics.responses import response_sums
from fedortho.storage.files import tensors_digest
from fedortho.training.loop import fit
from fedortho.training.objectives import LOSSES
from fedortho.training.recipe import Recipe


@dataclass
class AnswerCache:
    """What was computed for one model and is used again."""

    ledger: Observation | None = None
    tails: dict[tuple[object, ...], tuple[Split, Tensor]] = field(default_factory=dict)  # activations at its entry
    observed: dict[tuple[object, ...], Observation] = field(default_factory=dict)
    tally: Tally = field(default_factory=Tally)
    is_charged: bool = False  # whether the FLOPs that made the ledger are in the tally
    features: dict[tuple[object, ...], Tensor] = field(default_factory=dict)  # inputs of the classifier

    @property
    def kept(self) -> Kept | None:
        return None if self.ledger is None else self.ledger.kept


@dataclass(frozen=True)
class QueryContext:
    """One statistic of one model, and what is needed to compute it."""

    model: nn.Module
    train: Images  # all training images of this holder
    statistic: Statistic
    cache: AnswerCache
    device: torch.device | str

    def sites(self) -> list[Site]:
        kept = None if self.cache.kept is None else self.cache.kept.structure
        return structure_for(self.statistic.edit, self.model, self.train.shape, kept).sites(*self.which)

    @property
    def which(self) -> tuple[str, str, str]:
        return self.statistic.layers, self.statistic.edit, self.statistic.tap


DEEP = [("deep", edit, "stream") for edit in ("channel", DIRECTIONS)]  # a ledger keeps activations before these layers
AnswerFunction = Callable[[QueryContext, Images], Observation]


def answer(
    model: nn.Module,
    train: Images,
    groups: Sequence[Images],
    statistic: Statistic,
    *,
    cache: AnswerCache | None = None,
    device: torch.device | str = "cpu",
) -> list[Observation]:
    """One observation per group of images; `difference` takes two groups and gives their weighted difference.

    `train` are all training images of this holder: the ledger has sums over them.
    """
    context = QueryContext(model, train, statistic, cache or AnswerCache(), device)
    if statistic.kind == "difference":
        forget, retain = (_peaks(context, images) for images in groups)
        return [weighted_difference(forget, retain)]
    found, tally = [], context.cache.tally
    for images in groups:
        with FlopCounter() as counter:
            found.append(ANSWERS[statistic.kind](context, images))
        tally.kept_flops += counter.flops * _kept_share(context, images)
        tally.images_read += len(images) if statistic.kind in SUMS else 0
    return found if statistic.by_label else [observation.collapsed() for observation in found]


def _kept_share(context: QueryContext, images: Images) -> float:
    """The share of these images that precomputed statistics cover; `_peaks` counts its own."""
    covers = STATISTICS[context.statistic.kind].precomputable
    if not len(images) or not bool(torch.isin(images.rows, context.train.rows).all()):
        return 0.0
    if covers == "labels":
        whole = torch.bincount(images.labels) == torch.bincount(context.train.labels)[: int(images.labels.max()) + 1]
        return float(whole[images.labels].float().mean())
    return float(covers == "all" and len(images) == len(context.train))


def _peaks(context: QueryContext, images: Images) -> Observation:
    """Sums of peaks by label: from the ledger for labels that it covers, by a forward pass for the others."""
    taps = [(site, context.statistic.tap) for site in context.sites()]
    keys = [key_of(*tap) for tap in taps]
    observed, tally, ledger = context.cache.observed, context.cache.tally, context.cache.ledger

    def key(images: Images) -> tuple[object, ...]:
        return (*keys, images.rows.numpy().tobytes())

    def look(images: Images) -> Observation:
        if key(images) not in observed:
            classes, device = context.train.classes, context.device
            observed[key(images)] = observe(context.model, images, taps, classes=classes, device=device)
            tally.images_read += len(images)
        return observed[key(images)]

    if not bool(torch.isin(images.rows, context.train.rows).all()):  # validation images are in no ledger
        return look(images)
    if ledger is None or any(key not in ledger.sums or key in ledger.stale for key in keys):
        counts = torch.bincount(context.train.labels, minlength=context.train.classes)
        if context.statistic.sample:
            images = images.subset(steady_order(images.rows, 0)[: context.statistic.sample].sort().values)
        left, _ = _left_to_observe(counts, context.train, images)
        new = 0 if key(left) in observed else len(left)
        with FlopCounter() as counter:
            seen = look(images)
        tally.kept_flops += counter.flops * (1 - new / max(len(images), 1))
        return seen
    if not context.cache.is_charged:
        kept = context.cache.kept
        per_image = 0 if kept else flops_per_image(context.model, context.train.shape)[0]
        spent = kept.flops if kept else float(per_image * ledger.images)
        tally.flops, tally.kept_flops, context.cache.is_charged = tally.flops + spent, tally.kept_flops + spent, True
    ledger, counts = ledger.among(keys), torch.bincount(images.labels, minlength=context.train.classes)
    whole = (counts == ledger.counts) & (counts > 0)
    known = ledger.only(whole.nonzero().flatten().tolist())
    partial = ((counts > 0) & ~whole).nonzero().flatten().tolist()
    if not partial:
        return known
    left, subtract = _left_to_observe(ledger.counts, context.train, images)
    return known + (ledger.only(partial) - look(left) if subtract else look(left))


def _left_to_observe(kept: Tensor, train: Images, images: Images) -> tuple[Images, bool]:
    """What sums of whole labels over `kept` images leave to observe, and whether that is to be subtracted from them.

    Of labels that the images have in part it is the smaller side: the images, or the rest of the label.
    """
    counts, all_counts = (torch.bincount(each.labels, minlength=train.classes) for each in (images, train))
    partial = (counts > 0) & (counts != kept)
    rest = train.subset(partial[train.labels] & ~torch.isin(train.rows, images.rows))
    if len(rest) < int(counts[partial].sum()) and bool((all_counts == kept)[partial].all()):
        return rest, True
    return images.subset(partial[images.labels]), False


def _edited(context: QueryContext, images: Images, patch: Patch) -> tuple[nn.Module, Split, Tensor]:
    """The network's tail with a candidate applied, where it begins, and its inputs.

    Inputs are activations before the first layer that candidates edit: kept with the ledger, or computed.
    """
    tails, key = context.cache.tails, (*context.which, images.rows.numpy().tobytes())
    if key not in tails:
        sites, kept = context.sites(), context.cache.kept if context.which in DEEP else None
        if kept is not None and not {layer.name for site in sites for layer in site.layers} & {*kept.split.before}:
            tails[key] = kept.split, _kept_inputs(context, kept, images)
        else:
            example = images.normalise(images.pixels[images.rows[:2]].to(context.device))
            split = find_split(context.model, sites, example)
            tails[key] = split, image_activations(context.model, split, images, context.device)
            context.cache.tally.images_read += len(images)
    split, inputs = tails[key]
    return edit_in_place(tail_model(context.model, split), patch), split, inputs


def _kept_inputs(context: QueryContext, kept: Kept, images: Images) -> Tensor:
    """Kept activations, and those computed of the other images."""
    places = kept.places(images.rows)
    is_known = places >= 0
    if bool(is_known.all()):
        return kept.inputs[places].to(context.device).float()
    read = image_activations(context.model, kept.split, images.subset(~is_known), context.device)
    context.cache.tally.images_read += len(read)
    inputs = read.new_empty(len(images), *read.shape[1:])
    inputs[(~is_known).to(read.device)] = read
    if bool(is_known.any()):
        inputs[is_known.to(read.device)] = kept.inputs[places[is_known]].to(read)
    return inputs


def _right(context: QueryContext, images: Images) -> Observation:
    """Correct answers of each candidate, by label, and where their correctness differs from the first candidate's."""
    labels, classes = images.labels, context.train.classes
    right = [_is_right(context, images, patch) for patch in context.statistic.patches]
    sums = {}
    for name, several in (("right", right), ("changed", [each != right[0] for each in right])):
        counts = [torch.bincount(labels[which], minlength=classes) for which in several]
        sums[name] = torch.stack(counts, 1).double()  # on the CPU; (labels, candidates)
    return Observation(sums, torch.bincount(labels, minlength=classes))


def _is_right(context: QueryContext, images: Images, patch: Patch) -> Tensor:
    """Of each image whether a candidate's answer is right; what the unedited model answers is kept for some images."""
    kept = context.cache.kept
    if not len(images):
        return torch.zeros(0, dtype=torch.bool)
    if kept is not None and not patch.names() and bool(((places := kept.places(images.rows)) >= 0).all()):
        return kept.right[places]
    if not context.statistic.classifier:
        with torch.no_grad():
            outputs = run_tail(*_edited(context, images, patch))
    else:
        weight, bias = (f"{context.statistic.classifier}.{name}" for name in ("weight", "bias"))
        body = replace(patch, replaced={name: t for name, t in patch.replaced.items() if name not in (weight, bias)})
        state = {**context.model.state_dict(), **patch.replaced}
        rows, shift = (state[name].float().cpu() if name in state else None for name in (weight, bias))
        outputs = functional.linear(_features(context, images, body), rows, shift)  # type: ignore[arg-type]  # it has rows
    return outputs.argmax(1).cpu() == images.labels


def _features(context: QueryContext, images: Images, body: Patch) -> Tensor:
    """The classifier's inputs, (n, features), behind a candidate that leaves the classifier as it is; computed once."""
    name, known = context.statistic.classifier, context.cache.features
    key = (tensors_digest(body.packed()[0]), name, images.rows.numpy().tobytes())
    if key not in known:
        known[key] = classifier_inputs(*_edited(context, images, body), name)
    return known[key]


def _moments(context: QueryContext, images: Images) -> Observation:
    """First and second moments of batch-norm inputs, as each candidate's own batch statistics give them."""
    sums, count = _no_moments(context), 0
    for number, patch in enumerate(context.statistic.patches if len(images) > 1 else ()):  # one has no batch statistics
        twin, split, inputs = _edited(context, images, patch)
        buffers, count = estimate_norms(twin, split, context.statistic.norms, inputs)
        for norm in context.statistic.norms:
            mean, variance = (buffers[f"{norm}.running_{kind}"].cpu().double() for kind in ("mean", "var"))
            sums[f"{number}:{norm}:mean"] = count * mean.unsqueeze(0)
            sums[f"{number}:{norm}:square"] = count * (variance + mean.square()).unsqueeze(0)
    return Observation(sums, torch.tensor([count]))


def _no_moments(context: QueryContext) -> dict[str, Tensor]:
    sums: dict[str, Tensor] = {}
    for number in range(len(context.statistic.patches)):
        for norm in context.statistic.norms:
            nothing = torch.zeros(1, context.model.get_buffer(f"{norm}.running_mean").numel(), dtype=torch.float64)
            sums |= {f"{number}:{norm}:mean": nothing, f"{number}:{norm}:square": nothing}
    return sums


def _layer(context: QueryContext, images: Images) -> Observation:
    """Sums of one batch norm's inputs and of their squares, by each candidate as it is; exact on any partition."""
    (norm,) = context.statistic.norms
    sums, count = _no_moments(context), 0
    for number, patch in enumerate(context.statistic.patches if len(images) else ()):
        total, count = norm_sums(*_edited(context, images, patch), norm)
        sums |= {f"{number}:{norm}:mean": total[:1], f"{number}:{norm}:square": total[1:]}
    return Observation(sums, torch.tensor([count]))


def _classifier_inputs(context: QueryContext, images: Images) -> Observation:
    """Sums of the classifier's inputs and of their squares, for each candidate."""
    width = context.model.get_parameter(f"{context.statistic.classifier}.weight").shape[1]
    sums: dict[str, Tensor] = {}
    for number, patch in enumerate(context.statistic.patches):
        given = _features(context, images, patch) if len(images) else torch.zeros(0, width)
        given = given.double()  # on the CPU
        sums |= {f"{number}:sum": given.sum(0, keepdim=True), f"{number}:square": given.square().sum(0, keepdim=True)}
    return Observation(sums, torch.tensor([len(images)]))


def _gradient_sums(reduce: Callable[[Tensor], Tensor]) -> AnswerFunction:
    def add_up(context: QueryContext, images: Images) -> Observation:
        """Sums over batches of `reduce` of the gradient of the batch's mean loss, per parameter."""
        twin = copy.deepcopy(context.model).to(context.device).eval().requires_grad_(True)
        weights = dict(twin.named_parameters())
        dtype, device = sum_dtype(context.device), context.device
        sums = {name: torch.zeros(1, w.numel(), dtype=dtype, device=device) for name, w in weights.items()}
        batches = 0
        read = evaluation_batches(images, context.statistic.batch_size, context.device) if len(images) else ()
        for inputs, labels in read:  # no images make no batch
            loss = LOSSES[context.statistic.loss](twin(inputs), labels)
            gradients = torch.autograd.grad(loss, list(weights.values()), allow_unused=True)
            for name, gradient in zip(weights, gradients, strict=True):
                if gradient is not None:
                    sums[name] += reduce(gradient.to(dtype)).reshape(1, -1)  # channels may come last
            batches += 1
        context.cache.tally.images_trained += len(images)
        return Observation({name: total.cpu().double() for name, total in sums.items()}, torch.tensor([batches]))

    return add_up


def _drift(context: QueryContext, images: Images) -> Observation:
    """How far one local epoch of plain SGD moves each parameter, ‖p' − p‖₁, times the images it was trained on."""
    used = len(images) if len(images) > 1 else 0  # batch norm cannot train on one
    moved = context.model
    if used:
        size, lr = context.statistic.batch_size, context.statistic.lr
        recipe = Recipe(epochs=1, batch_size=size, lr=lr, schedule="constant", crop=0, flip=0.0, ortho=0.0)
        moved = fit(context.model, images, recipe, device=context.device)
        context.cache.tally.images_trained += used
    sums = {}
    for (name, before), after in zip(context.model.named_parameters(), moved.parameters(), strict=True):
        distance = (after.detach().cpu() - before.detach().cpu()).double().abs().sum()
        sums[name] = (used * distance).view(1, 1)
    return Observation(sums, torch.tensor([used]))


def _averages(context: QueryContext, images: Images) -> Observation:
    """Sums over images, by label, of each kernel's mean response over the map, negative responses being 0."""
    layers = {site.name: site.layers[0] for site in context.sites()}
    sums = {n: torch.zeros(context.train.classes, x.kernels, dtype=torch.float64) for n, x in layers.items()}
    has_norm = context.statistic.tap != "conv"  # where the output is read
    at = {layer.norm if has_norm and layer.norm else layer.name: name for name, layer in layers.items()}
    with torch.no_grad():
        for inputs, labels in evaluation_batches(images, device=context.device):
            with capture(context.model, at, lambda out: out.clamp_min(0).mean((2, 3))) as seen:
                context.model(inputs)
            for module, means in seen.items():
                sums[at[module]].index_add_(0, labels.cpu(), means[-1].cpu().double())
    return Observation(sums, torch.bincount(images.labels, minlength=context.train.classes))


ANSWERS: Mapping[str, AnswerFunction] = {
    "peaks": _peaks,
    "right": _right,
    "moments": _moments,
    "layer": _layer,
    "inputs": _classifier_inputs,
    "averages": _averages,
    "responses": lambda context, images: response_sums(context.model, images, context.sites(), context.device),
    "drift": _drift,
    "gram": lambda context, images: gram_sums(context.model, images, context.device),
    "fisher": _gradient_sums(Tensor.square),
    "fisher-abs": _gradient_sums(Tensor.abs),
    "gradient": _gradient_sums(lambda gradient: gradient),
}
SUMS = ("averages", "responses", "gram")  # one forward pass over the images
