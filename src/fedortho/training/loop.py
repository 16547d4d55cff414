"""The only SGD loop: cross-entropy or another objective, orthogonality, alignment; resumed to the same bytes."""

import copy
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.data.loaders import ImageSource
from fedortho.devices import check_bfloat16, counted_once, seed_random, sum_dtype
from fedortho.errors import BadCheckpoint, BadSetting, FedOrthoError
from fedortho.models.layout import arranged, memory_format_of
from fedortho.models.norms import frozen_norms
from fedortho.models.predictions import accuracy, answers_of
from fedortho.models.prepare import is_prepared, prepare_model, released
from fedortho.storage.files import below, damage_named, prefixed, read_tensors, tensors_digest, write_tensors
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
from fedortho.training.penalties import Penalties, ortho_layers
from fedortho.training.recipe import Recipe, learning_rate

CHECKPOINT_SECONDS = 30.0
REPORT_SECONDS = 0.2  # running sums are read, and reported, no more often: reading waits for the device
ORTHO_SECONDS = 10.0  # measuring the penalty costs as much as applying it
POSITION = ("epoch", "step", "seen", "seconds")  # of a training, as a checkpoint has it


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
    model: str | None = None  # digest of the model at its end, where epochs are logged


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
Keep = Callable[[int, Mapping[str, Tensor]], None]  # the number of epochs that ended, and the model
Mask = Mapping[str, Tensor]  # parameter → bool, True where it may change; parameters not named may change
PLAIN = FitOptions()


def fit(
    model: nn.Module,
    images: Images | ImageSource | Sequence[TrainingSet],
    recipe: Recipe | None = None,
    *,
    valid: Images | ImageSource | None = None,
    reference: nn.Module | None = None,
    device: torch.device | str = "cpu",
    checkpoint: Path | str | None = None,
    watch: Watch | None = None,
    keep: Keep | None = None,
    after: int = 0,
    trainable: Mask | None = None,
    options: FitOptions = PLAIN,
    teachers: Mapping[str, nn.Module] | None = None,
) -> nn.Module:
    """A trained copy of the model, in evaluation mode on the CPU; the given model is not changed.

    The loss is cross-entropy + ortho · ‖W Wᵀ − I‖² over the chosen layers + align · ‖W − W_ref‖²; the last term needs
    a `reference`, the model that a client received from the server.

    Args:
        images: training images, a loader or a dataset of them, or training sets that each have a target of their own.
        valid: images whose accuracy is measured after each epoch; training does not use them.
        checkpoint: a file from which a killed training continues, to the same bytes.
        after: epochs of the recipe that are over: batch order and learning rate go on after them.
        keep: receives the model after each epoch, whose digest the history then has.
        trainable: where it is False, a weight keeps its value bit for bit (see `options.masked_gradient`).
        options: batch order, optimiser, objective and batch-norm mode.
        teachers: the models that targets name.
    """
    recipe, training_sets, device = recipe or Recipe(), as_training_sets(images), torch.device(device)
    twin, teachers = prepare_model(model, getattr(training_sets[0].images, "classes", 0), fold=False), teachers or {}
    check_training_sets(twin, training_sets, recipe.batch_size)
    check_teachers(training_sets, options, teachers)
    if isinstance(valid, Images) and not len(valid):
        valid = None
    if recipe.precision == "bfloat16":
        check_bfloat16(device)
    if recipe.accumulate > 1 and len(training_sets) > 1:
        raise BadSetting(f"accumulate is {recipe.accumulate}; a step over several training sets is not split; give 1")
    if checkpoint is not None and options.optimiser != "sgd":
        raise BadSetting(f"the optimiser is {options.optimiser}; a checkpoint needs sgd; train without a checkpoint")
    layers = ortho_layers(twin, training_sets[0].images.shape, recipe, aligning=reference is not None)
    with _reproducible(device):
        state = _State(twin, training_sets, recipe, options, device, teachers)
        state.penalties = Penalties(state.model, layers, recipe, reference)
        state.held = _held(state.model, trainable or {})
        state.epoch = after
        if checkpoint is not None:
            state.belongs_to, state.inputs = _identity(model, state, reference, trainable), _inputs(state, after)
            state.resume(Path(checkpoint))
        while state.epoch < recipe.epochs:
            _run_epoch(state, valid, None if checkpoint is None else Path(checkpoint), watch, keep)
    if not all(bool(torch.isfinite(weight).all()) for weight in state.model.parameters()):
        raise FedOrthoError(f"some weights are not finite after training (ortho {recipe.ortho}); lower lr or ortho")
    trained = arranged(state.model.eval().cpu(), torch.contiguous_format)
    return trained if is_prepared(model) else released(trained)


class _State:
    """Model, optimiser, position and running sums: what a step reads and changes, and what a checkpoint saves."""

    def __init__(
        self,
        model: nn.Module,
        training_sets: list[TrainingSet],
        recipe: Recipe,
        options: FitOptions,
        device: torch.device,
        teachers: Mapping[str, nn.Module],
    ) -> None:
        self.training_sets, self.recipe, self.options, self.device = training_sets, recipe, options, device
        self.order = memory_format_of(model, training_sets[0].images.shape)
        self.model = arranged(model.to(device), self.order)
        self.teachers = {name: copy.deepcopy(teacher).to(device).eval() for name, teacher in teachers.items()}
        self.penalties = Penalties(self.model, [], recipe)
        self.held: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        fused = device.type in ("cpu", "cuda")
        self.optimiser = OPTIMISERS[options.optimiser](self.model.parameters(), recipe, fused)
        self.epoch, self.history = 0, list[Epoch]()
        self.belongs_to = self.inputs = ""
        self.step_flops: dict[object, int] = {}  # by the number of images and whether the penalty acts
        self.measured: tuple[float, float | None] = (-math.inf, None)  # when the penalty was measured, and its value
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Sums at 0, which stay on the device, and training mode; frozen batch norms stay in evaluation mode."""
        self.step = self.seen = 0
        self.seconds = 0.0
        self.loss_sum = torch.zeros((), dtype=sum_dtype(self.device), device=self.device)
        self.right = torch.zeros((), dtype=torch.int64, device=self.device)
        self.model.train()
        for name in frozen_norms(self.model, self.options.norms):
            self.model.get_submodule(name).eval()

    def means(self) -> tuple[float, float]:
        """Mean loss and accuracy of the epoch so far; stops a training whose loss is not finite."""
        loss = float(self.loss_sum)
        if not math.isfinite(loss):
            raise FedOrthoError(
                f"the loss became {loss} in epoch {self.epoch + 1}, step {self.step} or before "
                f"(lr {self.recipe.lr:.3g}, ortho {self.recipe.ortho}); lower lr or ortho"
            )
        return loss / max(self.seen, 1), int(self.right) / max(self.seen, 1)

    def ortho(self, *, at_most_old: float = 0.0) -> float | None:
        """The orthogonality penalty, measured at most `at_most_old` seconds ago."""
        if time.perf_counter() - self.measured[0] >= at_most_old:
            self.measured = (time.perf_counter(), self.penalties.ortho())
        return self.measured[1]

    def progress(self, steps: int, images_per_second: float) -> Progress:
        position, ortho = (self.epoch, self.recipe.epochs, self.step, steps), self.ortho(at_most_old=ORTHO_SECONDS)
        return Progress(*position, *self.means(), images_per_second, ortho, tuple(self.history))

    def save(self, path: Path) -> None:
        self.means()  # what is not finite is not saved
        tensors = prefixed("model.", self.model.state_dict())
        for name, parameter in self.model.named_parameters():
            momentum = self.optimiser.state[parameter].get("momentum_buffer")
            if momentum is not None:
                tensors[f"momentum.{name}"] = momentum
        note: dict[str, object] = {name: getattr(self, name) for name in POSITION}
        note |= {"loss_sum": float(self.loss_sum), "right": int(self.right)}
        note["history"] = [asdict(entry) for entry in self.history]
        write_tensors(path, tensors, {"belongs_to": self.belongs_to, "inputs": self.inputs, "progress": note})

    def resume(self, path: Path) -> None:
        if not path.exists():
            return
        try:
            tensors, note = read_tensors(path)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{error}; remove it to start again") from error
        is_other = note.get("belongs_to") != self.belongs_to
        if is_other or note.get("inputs", self.inputs) != self.inputs:  # earlier versions noted none
            raise BadCheckpoint(f"{path} belongs to other settings, data or weights; remove it to start again")
        with damage_named(path):
            self._restore(tensors, note["progress"])

    def _restore(self, tensors: Mapping[str, Tensor], saved: Mapping[str, Any]) -> None:
        self.model.load_state_dict(below("model.", tensors))
        for name, parameter in self.model.named_parameters():
            if f"momentum.{name}" in tensors:
                momentum = torch.empty_like(parameter).copy_(tensors[f"momentum.{name}"]).detach()
                self.optimiser.state[parameter]["momentum_buffer"] = momentum
        self.epoch, self.step, self.seen, self.seconds = (saved[name] for name in POSITION)
        self.loss_sum.fill_(saved["loss_sum"])
        self.right.fill_(saved["right"])
        self.history = [Epoch(**entry) for entry in saved["history"]]


def _inputs(state: _State, after: int) -> str:
    """A digest of what images become, which weights are frozen, and where the training began."""
    sets = [(each.given, each.images.input_digest) for each in state.training_sets if len(each.images)]
    frozen = [name for name, weight in state.model.named_parameters() if not weight.requires_grad]
    return hashlib.sha256(f"{sets} {frozen} {after}".encode()).hexdigest()


def _identity(model: nn.Module, state: _State, reference: nn.Module | None, trainable: Mask | None) -> str:
    """A digest of all else that determines the trained weights; a checkpoint with another one is refused."""
    parts = [json.dumps(asdict(state.recipe), sort_keys=True)]
    for training_set in state.training_sets:
        images = training_set.images
        parts.append(tensors_digest({"rows": images.rows, "labels": images.store_labels, "pixels": images.pixels}))
    parts += [tensors_digest(m.state_dict()) for m in (model, reference, *state.teachers.values()) if m is not None]
    parts += [tensors_digest(trainable)] if trainable else []
    targets = [training_set.target for training_set in state.training_sets]
    parts += [f"{state.options} {targets}"] if state.options != PLAIN or targets != [Target()] else []
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def check_mask(model: nn.Module, trainable: Mask) -> None:
    """Refuse a mask of a parameter that the model lacks or has in another shape."""
    known = dict(model.named_parameters())
    if other := [name for name in trainable if name not in known or known[name].shape != trainable[name].shape]:
        raise BadSetting(f"the mask names {other[0]}, which the model lacks or has in another shape")


def _held(model: nn.Module, trainable: Mask) -> list[tuple[nn.Parameter, Tensor, Tensor]]:
    """Partly trainable parameters, each with its mask and its original values."""
    check_mask(model, trainable)
    known = dict(model.named_parameters())
    held = [(known[name], mask.to(known[name].device)) for name, mask in trainable.items() if not bool(mask.all())]
    return [(parameter, mask, parameter.detach().clone()) for parameter, mask in held]


def _run_epoch(
    state: _State,
    valid: Images | ImageSource | None,
    checkpoint: Path | None,
    watch: Watch | None,
    keep: Keep | None,
) -> None:
    recipe = state.recipe
    batches = plan_steps(state.training_sets, recipe.batch_size, recipe.seed, state.epoch, state.options.order)
    started = saved = read = time.perf_counter()
    seen_before, seconds_before = state.seen, state.seconds
    for step in range(state.step, len(batches)):
        sizes, since = tuple(map(len, batches[step])), state.epoch * len(batches) + step
        with counted_once(state.step_flops, (sizes, state.penalties.is_due(since))):
            _take_step(state, batches[step], step, len(batches))
        state.step = step + 1
        now = time.perf_counter()
        state.seconds = seconds_before + now - started
        if now - read > REPORT_SECONDS:
            read = now
            told = state.progress(len(batches), (state.seen - seen_before) / (now - started))
            if watch is not None:
                watch(told)
        if checkpoint is not None and now - saved > CHECKPOINT_SECONDS:
            state.save(checkpoint)
            saved = now
    loss, train_accuracy = state.means()
    speed = (state.seen - seen_before) / max(time.perf_counter() - started, 1e-9)
    valid_accuracy = None if valid is None else accuracy(state.model, valid, device=state.device)
    entry = Epoch(state.epoch, loss, train_accuracy, state.ortho(), valid_accuracy, state.seconds, images=state.seen)
    if keep is not None:
        weights = state.model.state_dict()
        entry = replace(entry, model=tensors_digest(weights))
        keep(state.epoch + 1, weights)
    state.history.append(entry)
    told = state.progress(len(batches), speed)
    state.epoch += 1
    state.begin_epoch()
    if checkpoint is not None:
        state.save(checkpoint)
    if watch is not None:
        watch(told)


def _take_step(state: _State, rows: Rows, step: int, steps: int) -> None:
    """One optimiser step on these rows; nothing here waits for the device."""
    recipe = state.recipe
    seed = step_seed(recipe.seed, state.epoch, step + 1)
    seed_random(seed, state.device)  # for dropout inside the model
    augment = Augment(recipe.crop, recipe.flip, recipe.erase)
    inputs, labels = read_step(state.training_sets, rows, augment, seed, state.device)
    inputs = inputs.contiguous(memory_format=state.order)
    state.optimiser.zero_grad()
    parts = min(recipe.accumulate, max(len(inputs) // 2, 1))  # batch norm needs two images
    for start, end in pairwise(len(inputs) * part // parts for part in range(parts + 1)):
        _add_gradients(state, rows, start, end, inputs, labels)
    if state.options.masked_gradient:
        for parameter, mask, _ in state.held:
            if parameter.grad is not None:
                parameter.grad.mul_(torch.where(mask, 1.0, state.options.masked_gradient))
    lr = learning_rate(recipe, state.epoch + step / steps)
    state.penalties.add_gradients(lr, state.epoch * steps + step)
    state.optimiser.param_groups[0]["lr"] = lr
    state.optimiser.step()
    with torch.no_grad():
        for parameter, mask, original in () if state.options.masked_gradient else state.held:
            parameter.copy_(torch.where(mask, parameter, original))
    state.seen += len(labels)


def _add_gradients(state: _State, rows: Rows, start: int, end: int, inputs: Tensor, labels: Tensor) -> None:
    """Add the gradients of a part of a step's images, weighted by its share."""
    share = (end - start) / len(inputs)
    if share < 1:
        rows, inputs, labels = [rows[0][start:end]], inputs[start:end], labels[start:end]
    with torch.autocast(state.device.type, torch.bfloat16, enabled=state.recipe.precision == "bfloat16"):
        outputs = answers_of(state.model, inputs)
    loss = step_loss(state.training_sets, rows, state.options, inputs, outputs.float(), labels, state.teachers)
    (loss * share if share < 1 else loss).backward()
    with torch.no_grad():
        state.loss_sum += loss.detach().to(state.loss_sum.dtype) * len(labels)
        state.right += (outputs.argmax(1) == labels).sum()


@contextmanager
def _reproducible(device: torch.device) -> Iterator[None]:
    """Restore the caller's random state afterwards, and choose deterministic algorithms on a GPU."""
    cudnn = torch.backends.cudnn
    before = (cudnn.deterministic, cudnn.benchmark)  # cudnn.flags() would also switch cuDNN off
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=kind):
        try:
            cudnn.deterministic, cudnn.benchmark = True, False
            yield
        finally:
            cudnn.deterministic, cudnn.benchmark = before
