"""The only SGD loop: cross-entropy or another objective, orthogonality, alignment; resumed to the same bytes."""

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.devices import flops_of
from fedortho.errors import BadCheckpoint, BadSetting, FedOrthoError
from fedortho.models.graph import Layer, select_layers, trace_layers
from fedortho.models.norms import frozen_norms
from fedortho.models.predictions import accuracy, answers_of
from fedortho.storage.files import read_tensors, tensors_digest, write_tensors
from fedortho.training.augmentation import Augment
from fedortho.training.batches import plan_steps, read_step, step_seed
from fedortho.training.objectives import (
    OPTIMISERS,
    FitOptions,
    Rows,
    Target,
    TrainingSet,
    as_training_sets,
    check_teachers,
    check_training_sets,
    step_loss,
)
from fedortho.training.orthogonality import add_align_gradient, add_ortho_gradient, ortho_penalty
from fedortho.training.recipe import Recipe, learning_rate

CHECKPOINT_SECONDS = 30.0
REPORT_SECONDS = 0.2
ORTHO_SECONDS = 10.0  # measuring the penalty costs as much as applying it


@dataclass(frozen=True)
class Epoch:
    """The measurements of one epoch, or of one round of a federation."""

    epoch: int
    loss: float  # mean over the epoch's augmented training images
    accuracy: float  # on the same images
    ortho: float | None  # penalty at the end of the epoch, summed over the layers; None: off
    valid: float | None  # accuracy on the validation images
    seconds: float
    clients: int | None = None  # federation: how many clients trained in the round
    drift: float | None = None  # federation: mean distance of their weights from the received ones
    images: int | None = None  # counted at every reading


@dataclass(frozen=True)
class Progress:
    """The state of a training, reported a few times a second and at the end of each epoch."""

    epoch: int
    epochs: int
    step: int  # within the epoch
    steps: int
    loss: float
    accuracy: float
    images_per_second: float
    ortho: float | None  # penalty of the chosen layers, at most ORTHO_SECONDS old
    history: tuple[Epoch, ...]


Watch = Callable[[Progress], None]
Mask = Mapping[str, Tensor]  # parameter → bool, True where it may change; parameters not named may change
PLAIN = FitOptions()


def fit(
    model: nn.Module,
    images: Images | Sequence[TrainingSet],
    recipe: Recipe | None = None,
    *,
    valid: Images | None = None,
    reference: nn.Module | None = None,
    device: torch.device | str = "cpu",
    checkpoint: Path | str | None = None,
    watch: Watch | None = None,
    trainable: Mask | None = None,
    options: FitOptions = PLAIN,
    teachers: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """A trained copy of the model, in evaluation mode on the CPU; the given model is not changed.

    The loss is cross-entropy + ortho · ‖W Wᵀ − I‖² over the chosen layers + align · ‖W − W_ref‖²; the last term needs
    a `reference`, the model that a client received from the server.

    Args:
        images: training images, or training sets that each have a target of their own.
        valid: images whose accuracy is measured after each epoch; training does not use them.
        checkpoint: a file from which a killed training continues, to the same bytes.
        trainable: where it is False, a weight keeps its value bit for bit.
        options: batch order, optimiser, objective and batch-norm mode.
        teachers: the models that targets name.
    """
    recipe = recipe or Recipe()
    checkpoint = None if checkpoint is None else Path(checkpoint)
    training_sets = as_training_sets(images)
    twin = copy.deepcopy(model)
    check_training_sets(twin, training_sets, recipe.batch_size)
    check_teachers(training_sets, options, teachers or {})
    if checkpoint is not None and options.optimiser != "sgd":
        raise BadSetting(f"the optimiser is {options.optimiser}; a checkpoint needs sgd; train without a checkpoint")
    with _reproducible():
        state = _State(twin, training_sets, recipe, torch.device(device), reference, trainable, options, teachers)
        if checkpoint is not None:
            state.belongs_to = _identity(model, state, reference, trainable)
            state.resume(checkpoint)
        while state.epoch < recipe.epochs:
            _run_epoch(state, valid, checkpoint, watch)
    if not all(bool(torch.isfinite(weight).all()) for weight in state.model.parameters()):
        raise FedOrthoError(f"some weights are not finite after training (ortho {recipe.ortho}); lower lr or ortho")
    return arranged(state.model.eval().cpu(), torch.contiguous_format)


def check_fit(model: nn.Module, images: Images, recipe: Recipe) -> None:
    """Refuse images that the model cannot be trained on; raises BadData or BadSetting."""
    check_training_sets(model, [TrainingSet(images)], recipe.batch_size)


def _identity(model: nn.Module, state: "_State", reference: nn.Module | None, trainable: Mask | None) -> str:
    """A digest of everything that determines the trained weights; a checkpoint with another one is refused."""
    parts = [json.dumps(asdict(state.recipe), sort_keys=True)]
    for training_set in state.training_sets:
        images = training_set.images
        parts.append(tensors_digest({"rows": images.rows, "labels": images.store_labels, "pixels": images.pixels}))
    parts += [tensors_digest(m.state_dict()) for m in (model, reference, *state.teachers.values()) if m is not None]
    parts += [tensors_digest(trainable)] if trainable else []
    targets = [training_set.target for training_set in state.training_sets]
    parts += [f"{state.options} {targets}"] if state.options != PLAIN or targets != [Target()] else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def arranged(model: nn.Module, order: torch.memory_format) -> nn.Module:
    """The model itself with its weights in this memory format; convolutions are faster in channels-last."""
    return model.to(memory_format=order)  # type: ignore[call-overload, no-any-return]  # torch's stub lacks this form


class _State:
    """Model, optimiser, position and running sums: what a step reads and changes, and what a checkpoint saves."""

    def __init__(
        self,
        model: nn.Module,
        training_sets: list[TrainingSet],
        recipe: Recipe,
        device: torch.device,
        reference: nn.Module | None,
        trainable: Mask | None = None,
        options: FitOptions = PLAIN,
        teachers: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self.training_sets, self.recipe, self.device, self.options = training_sets, recipe, device, options
        self.belongs_to = ""
        layers = ortho_layers(model, training_sets[0].images.shape, recipe, aligning=reference is not None)
        self.model = arranged(model.to(device), torch.channels_last)
        self.set_mode()
        self.teachers = {name: copy.deepcopy(teacher).to(device).eval() for name, teacher in (teachers or {}).items()}
        self.convs = [_conv(self.model, layer.name) for layer in layers]
        self.aligned, self.reference = _aligned(self.model, reference, layers, recipe)
        self.held = _held(self.model, trainable or {})
        self.optimiser = OPTIMISERS[options.optimiser](
            self.model.parameters(), recipe.lr, recipe.weight_decay, recipe.momentum, device.type in ("cpu", "cuda")
        )
        self.epoch, self.step = 0, 0
        self.loss_sum, self.right, self.seen = 0.0, 0, 0
        self.seconds = 0.0
        self.measured: tuple[float, float] | None = None  # when the penalty was measured, and its value
        self.history: list[Epoch] = []

    def set_mode(self) -> None:
        """Training mode; frozen batch norms stay in evaluation mode and keep their running statistics."""
        self.model.train()
        for name in frozen_norms(self.model, self.options.norms):
            self.model.get_submodule(name).eval()

    def ortho(self, *, at_most_old: float = 0.0) -> float | None:
        """The orthogonality penalty, measured at most `at_most_old` seconds ago."""
        if not self.convs:
            return None
        if self.measured is None or time.perf_counter() - self.measured[0] >= at_most_old:
            with torch.no_grad():
                value = float(sum(ortho_penalty(conv, self.recipe.tall) for conv in self.convs))
            self.measured = (time.perf_counter(), value)
        return self.measured[1]

    def save(self, path: Path) -> None:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            momentum = self.optimiser.state[parameter].get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{name}"] = momentum
        note: dict[str, object] = {
            "epoch": self.epoch,
            "step": self.step,
            "loss_sum": self.loss_sum,
            "right": self.right,
        }
        note |= {"seen": self.seen, "seconds": self.seconds, "history": [asdict(entry) for entry in self.history]}
        write_tensors(path, tensors, {"belongs_to": self.belongs_to, "progress": note})

    def resume(self, path: Path) -> None:
        if not path.exists():
            return
        try:
            tensors, note = read_tensors(path)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{error}; remove it to start again") from error
        if note.get("belongs_to") != self.belongs_to:
            raise BadCheckpoint(f"{path} belongs to other settings, data or weights; remove it to start again")
        saved = note["progress"]
        weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
        self.model.load_state_dict(weights)
        for name, parameter in self.model.named_parameters():
            if f"momentum.{name}" in tensors:
                momentum = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"]).detach()
                self.optimiser.state[parameter]["momentum_buffer"] = momentum
        self.epoch, self.step, self.loss_sum = saved["epoch"], saved["step"], saved["loss_sum"]
        self.right, self.seen, self.seconds = saved["right"], saved["seen"], saved["seconds"]
        self.history = [Epoch(**entry) for entry in saved["history"]]


def ortho_layers(
    model: nn.Module, shape: tuple[int, int, int], recipe: Recipe, *, aligning: bool = False
) -> list[Layer]:
    """The layers that the penalties act on; raises BadSetting for a layer that cannot have one."""
    if not recipe.ortho and not (aligning and recipe.align and recipe.align_layers == "ortho"):
        return []
    chosen = select_layers(trace_layers(model, shape), recipe.ortho_layers)
    if unused := [layer.name for layer in chosen if layer.stage < 0]:
        raise BadSetting(f"no forward pass reaches {', '.join(unused)}; choose other ortho-layers")
    computed = [layer.name for layer in chosen if not isinstance(_conv(model, layer.name).weight, nn.Parameter)]
    if computed:
        raise BadSetting(f"the weights of {', '.join(computed)} are computed (such as by weight norm); choose others")
    if recipe.tall == "skip":
        chosen = [layer for layer in chosen if not layer.is_tall]
        if not chosen:
            raise BadSetting(f"tall = skip leaves none of the layers {recipe.ortho_layers!r}; choose others")
    return chosen


def ortho_flops(model: nn.Module, shape: tuple[int, int, int], recipe: Recipe) -> int:
    """FLOPs of one step of the orthogonality penalty: the products of its gradient."""
    if not recipe.ortho:
        return 0
    twin = copy.deepcopy(model).cpu()
    convs = [_conv(twin, layer.name) for layer in ortho_layers(twin, shape, recipe)]
    return flops_of(lambda: add_ortho_gradient(convs, recipe.ortho, _curvature_limit(recipe, 1.0)))


def _conv(model: nn.Module, name: str) -> nn.Conv2d:
    conv = model.get_submodule(name)
    assert isinstance(conv, nn.Conv2d)
    return conv


def _aligned(
    model: nn.Module, reference: nn.Module | None, layers: Sequence[Layer], recipe: Recipe
) -> tuple[list[Tensor], list[Tensor]]:
    """The weights that the alignment penalty acts on, and their values in the reference."""
    if reference is None or not recipe.align:
        return [], []
    names = [f"{layer.name}.weight" for layer in layers]
    if recipe.align_layers == "all":
        names = [name for name, _ in model.named_parameters()]
    mine, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    names = [name for name in names if mine[name].requires_grad]
    if other := [name for name in names if name not in theirs or theirs[name].shape != mine[name].shape]:
        raise BadSetting(f"the reference is another network: it lacks {other[0]} or has it in another shape")
    return [mine[n] for n in names], [torch.empty_like(mine[n]).copy_(theirs[n]).detach() for n in names]


def _held(model: nn.Module, trainable: Mask) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
    """Partly trainable parameters, each with its mask and its original values."""
    known = dict(model.named_parameters())
    if other := [name for name in trainable if name not in known or known[name].shape != trainable[name].shape]:
        raise BadSetting(f"the mask names {other[0]}, which the model lacks or has in another shape")
    held = [(known[name], mask.to(known[name].device)) for name, mask in trainable.items() if not bool(mask.all())]
    return [(parameter, mask, parameter.detach().clone()) for parameter, mask in held]


def _run_epoch(state: _State, valid: Images | None, checkpoint: Path | None, watch: Watch | None) -> None:
    recipe = state.recipe
    batches = plan_steps(state.training_sets, recipe.batch_size, recipe.seed, state.epoch, state.options.order)
    started = saved = reported = time.perf_counter()
    seen_before, seconds_before = state.seen, state.seconds
    for step in range(state.step, len(batches)):
        number = sum(map(len, batches[step]))
        loss, right = _take_step(state, batches[step], step, len(batches))
        state.loss_sum += loss * number
        state.right += right
        state.seen += number
        state.step = step + 1
        now = time.perf_counter()
        state.seconds = seconds_before + now - started
        if watch is not None and now - reported > REPORT_SECONDS:
            reported = now
            watch(_progress(state, len(batches), (state.seen - seen_before) / (now - started)))
        if checkpoint is not None and now - saved > CHECKPOINT_SECONDS:
            state.save(checkpoint)
            saved = now
    speed = (state.seen - seen_before) / max(time.perf_counter() - started, 1e-9)
    valid_accuracy = accuracy(state.model, valid, device=state.device) if valid is not None and len(valid) else None
    loss, train_accuracy = state.loss_sum / state.seen, state.right / state.seen
    entry = Epoch(state.epoch, loss, train_accuracy, state.ortho(), valid_accuracy, state.seconds, images=state.seen)
    state.history.append(entry)
    final = _progress(state, len(batches), speed)
    state.epoch, state.step, state.loss_sum, state.right, state.seen, state.seconds = state.epoch + 1, 0, 0.0, 0, 0, 0.0
    state.set_mode()
    if checkpoint is not None:
        state.save(checkpoint)
    if watch is not None:
        watch(final)


def _progress(state: _State, steps: int, speed: float) -> Progress:
    loss, right = state.loss_sum / max(state.seen, 1), state.right / max(state.seen, 1)
    ortho, history = state.ortho(at_most_old=ORTHO_SECONDS), tuple(state.history)
    return Progress(state.epoch, state.recipe.epochs, state.step, steps, loss, right, speed, ortho, history)


def _take_step(state: _State, rows: Rows, step: int, steps: int) -> tuple[float, int]:
    """One optimiser step on these rows; returns its mean loss and the number of correct predictions."""
    recipe = state.recipe
    seed = step_seed(recipe.seed, state.epoch, step + 1)
    torch.manual_seed(seed)  # for dropout inside the model
    augment = Augment(recipe.crop, recipe.flip, recipe.erase)
    inputs, labels = read_step(state.training_sets, rows, augment, seed, state.device)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    with torch.autocast(state.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
        outputs = answers_of(state.model, inputs)
    loss = step_loss(state.training_sets, rows, state.options, inputs, outputs.float(), labels, state.teachers)
    state.optimiser.zero_grad()
    loss.backward()
    lr = learning_rate(recipe, state.epoch + step / steps)
    since_start = state.epoch * steps + step
    if recipe.ortho and lr and since_start % recipe.ortho_every == 0:
        add_ortho_gradient(state.convs, recipe.ortho * recipe.ortho_every, _curvature_limit(recipe, lr))
    if state.aligned:
        add_align_gradient(state.aligned, state.reference, recipe.align)
    state.optimiser.param_groups[0]["lr"] = lr
    state.optimiser.step()
    with torch.no_grad():
        for parameter, mask, original in state.held:
            parameter.copy_(torch.where(mask, parameter, original))
    value = loss.item()
    if not math.isfinite(value):
        raise FedOrthoError(
            f"the loss became {value} in epoch {state.epoch + 1}, step {step + 1} "
            f"(lr {lr:.3g}, ortho {recipe.ortho}); lower lr or ortho"
        )
    return value, int((outputs.argmax(1) == labels).sum())


def _curvature_limit(recipe: Recipe, lr: float) -> float:
    """Largest stable curvature of a penalty step: momentum descent with a push every k steps is stable below 3.6/k."""
    return min(2.4, 1.3 * (1 + recipe.momentum)) / (recipe.ortho_every * lr)  # without momentum the limit is 2/k


@contextmanager
def _reproducible() -> Iterator[None]:
    """Restore the caller's random state afterwards, and choose deterministic algorithms on a GPU."""
    with torch.random.fork_rng(), torch.backends.cudnn.flags(deterministic=True, benchmark=False):
        yield
