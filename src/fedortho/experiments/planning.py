"""What a table would take, before anything is trained: networks, cells, hours and memory, from a few images."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from fedortho.devices import choose_device, using_threads
from fedortho.engines.cost import flops_per_image
from fedortho.experiments.experiment import PAPER_DATA, Experiment, network_key, request_for
from fedortho.experiments.relations import as_text
from fedortho.experiments.runner import known_networks, located_networks, network_path
from fedortho.models.zoo import build_model
from fedortho.requests.references import find_reference, reference_name, reference_settings
from fedortho.runs.record import RunRecord, read_run_record
from fedortho.runs.run import Run, load_run_data, open_run
from fedortho.runs.settings import FederateSettings, TrainSettings
from fedortho.storage.records import Scalar
from fedortho.training.penalties import ortho_flops

PROBE = 4  # images of a measured step
PIXELS = {"cifar10": 32, "cifar100": 32, "tiny-imagenet": 64}  # of a side


@dataclass(frozen=True)
class NetworkPlan:
    """What one network of a table takes, with all its seeds."""

    key: Mapping[str, Scalar]
    networks: int  # one for each seed
    references: int  # retrained networks, one for each seed and request
    cells: int  # rows with values, for each seed
    hours: float  # of one training
    batch_size: int
    gigabytes: float  # weights, gradients, momentum and activations of a batch, or of a part of it
    parts: int = 1  # of a batch, one after the other
    trained: int = 0  # networks and reference models that need no training any more

    @property
    def text(self) -> str:
        """In words."""
        weights = [f"{name} {as_text(self.key[name])}" for name in ("lambda", "align") if name in self.key]
        name = "{model} on {data}, {split}, orthogonal layers: {ortho}".format_map(dict(self.key))
        name = ", ".join([name, *weights])
        known = f" ({self.trained} of them trained before)" if self.trained else ""
        number = f"{self.networks} networks and {self.references} reference models{known}, {self.cells} cells"
        batch = f"{self.batch_size}{f' in {self.parts} parts' if self.parts > 1 else ''}"
        return f"{name}: {number}; {self.hours:,.1f} hours each, {self.gigabytes:.1f} GB at batch {batch}"


def plan_experiment(
    experiment: Experiment,
    out: Path | str = "runs/reproduce",
    *,
    data_dir: str = "",
    networks: Path | str | None = None,
    device: str = "auto",
) -> list[NetworkPlan]:
    """What each network takes on this machine; nothing is trained.

    Hours are of training on an idle machine, by a float32 step of a few images; edits and baselines come on top. What
    `reproduce` would find in `out` or copy from `networks` is counted; data of the paper's names is read only for that.
    """
    before = known_networks(networks)
    plans, seeds, requests = [], len(experiment.seeds), len(experiment.requests)
    is_retrained = any(variant.method == "retrain" for variant in experiment.variants)
    methods = len(experiment.variants)
    cells = seeds * (1 + requests * methods if experiment.is_sequence else requests * (1 + methods))
    for settings in located_networks(experiment, data_dir, device):
        classes, images, shape = _data_of(settings)
        probe = _probe(settings.model, classes, shape, settings.device, settings.threads)
        passes = settings.epochs * images
        if isinstance(settings, FederateSettings):
            passes = int(passes * settings.rounds * settings.fraction)
        penalties = passes / settings.batch_size / settings.ortho_every if settings.ortho else 0
        flops = ortho_flops(build_model(settings.model, num_classes=classes, channels=shape[0]), shape, settings.recipe)
        seconds = passes * probe.seconds + penalties * flops * probe.seconds / probe.flops
        memory = probe.weight_bytes * 3 + probe.image_bytes * -(-settings.batch_size // settings.accumulate)
        references = seeds * requests * is_retrained
        effort = (seeds, references, cells, seconds / 3600, settings.batch_size, memory / 1e9, settings.accumulate)
        trained = _number_trained(experiment, settings, Path(out), before)
        plans.append(NetworkPlan(network_key(settings), *effort, trained))
    return plans


def _number_trained(experiment: Experiment, settings: TrainSettings, out: Path, networks: Path | None) -> int:
    """Networks and reference models of these settings that are in `out` or in `networks`, over all seeds."""
    digest = load_run_data(settings).digest if networks else ""
    is_retrained, number = any(variant.method == "retrain" for variant in experiment.variants), 0

    def found(place: Path, wanted: TrainSettings) -> Run | None:
        if isinstance(read_run_record(place), RunRecord):
            return open_run(place)
        return find_reference(networks, wanted, digest) if networks else None

    for seed in experiment.seeds:
        wanted = replace(settings, seed=seed)
        place = network_path(out / "networks", wanted)
        if (run := found(place, wanted)) is None:
            continue
        number += 1
        run = replace(run, settings=wanted)  # its data may lie elsewhere than during training
        for request in [request_for(words, run.load_data()) for words in experiment.requests if is_retrained]:
            again = reference_settings(run, request)
            name = reference_name(replace(run, path=place), request, again)
            number += found(out / "references" / name, again) is not None
    return number


def _data_of(settings: TrainSettings) -> tuple[int, int, tuple[int, int, int]]:
    """Classes, training images without those held out, and the shape of an image."""
    if settings.data not in PAPER_DATA:
        data = load_run_data(settings)
        return data.train.classes, len(data.train), data.train.shape
    classes, train, _ = PAPER_DATA[settings.data]
    side = settings.image_size or PIXELS[settings.data]
    return classes, round(train * (1 - settings.valid)), (3, side, side)


@dataclass(frozen=True)
class _Probe:
    seconds: float  # of one image, forward and backward
    flops: int  # of one image, forward and backward
    weight_bytes: int
    image_bytes: int  # that the forward pass of one image keeps for the backward pass


@cache
def _probe(name: str, classes: int, shape: tuple[int, int, int], device: str, threads: int) -> _Probe:
    """A measured step of a new network; the faster of two, since the first one warms up."""
    place = choose_device(device)
    model = build_model(name, num_classes=classes, channels=shape[0])
    flops = flops_per_image(model, shape)[1]
    model = model.to(place).train()
    inputs, labels = torch.zeros(PROBE, *shape, device=place), torch.zeros(PROBE, dtype=torch.long, device=place)
    with using_threads(threads):
        kept = _kept_bytes(model, inputs)
        seconds = min(_step_seconds(model, inputs, labels) for _ in range(2))
    weights = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    return _Probe(seconds / PROBE, flops, weights, kept // PROBE)


def _kept_bytes(model: nn.Module, inputs: Tensor) -> int:
    """Bytes of the tensors that a forward pass keeps for its backward pass, weights aside, each once."""
    known = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no two share an address

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs)
    return sum(each.untyped_storage().nbytes() for address, each in kept.items() if address not in known)


def _step_seconds(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Of a step; on a CPU by the time that its threads computed, so that other programs do not count."""
    on_cpu = inputs.device.type == "cpu"
    clock, threads = (time.process_time, torch.get_num_threads()) if on_cpu else (time.perf_counter, 1)
    started = clock()
    model.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    next(weight.grad for weight in model.parameters() if weight.grad is not None).sum().item()  # waits for the device
    return (clock() - started) / threads
