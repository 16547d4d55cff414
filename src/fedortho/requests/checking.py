"""Whether a network can be served: every step of the way, tried on a few images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from fedortho.data.images import Dataset, Images, images_from_tensors
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import central_engine
from fedortho.errors import FedOrthoError, first_line
from fedortho.methods import Data, as_dataset, as_model
from fedortho.methods.directions import Directions
from fedortho.methods.hide import Hide
from fedortho.methods.paper import Paper
from fedortho.models.layout import memory_format_of
from fedortho.models.sites import Finding, trace_structure
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe
from fedortho.unlearning.calibrate import UNPRUNED
from fedortho.unlearning.task import start_task
from fedortho.unlearning.trials import make_runner

FORGET, RETAIN = 8, 16  # images that the steps are tried on
METHODS_OF_OURS: tuple[Hide | Directions | Paper, ...] = (Hide(ratio=0.1), Directions(ratio=0.1), Paper(alpha=1.0))


@dataclass(frozen=True)
class ModelCheck:
    """What can be done with a network; a reason of None says that the step works."""

    memory_format: str  # channels_last, or contiguous for a network that cannot read it
    layers: tuple[Finding, ...]  # every convolution with the edits that apply to it
    edited: tuple[str, ...]  # the sites that `hide` edits
    left_out: Mapping[str, str]  # layers at that depth that cannot be edited, each with the reason
    methods: Mapping[str, str | None]  # hide, directions, paper → why it cannot serve the network
    classifier: str | None  # why the classifier cannot be edited
    training: str | None  # why the network cannot be trained further

    @property
    def is_served(self) -> bool:
        """Whether `hide` serves the network, by pruning or by a classifier edit alone."""
        return self.methods["hide"] is None


def check(
    model: nn.Module,
    data: Data | tuple[int, int, int],
    *,
    num_classes: int = 10,
    on_step: Callable[[str], None] = lambda step: None,
) -> ModelCheck:
    """Try every step on a few images: reading, answering, each method of ours, the classifier edit, training.

    `data` is what `forget` takes, or the shape of an image, (channels, height, width), for random images of
    `num_classes` classes. The model is not changed; one that no method of ours can edit at all is refused.
    """
    few = _random_images(data, num_classes) if isinstance(data, tuple) else _few_images(as_dataset(data).train)
    dataset = Dataset("a few images", few, few, few, "")
    on_step("structure")
    known = as_model(model, dataset)
    engine, request = central_engine(known, dataset), ForgetRequest.parse(f"class:{int(few.labels[0])}")
    task = start_task(known, engine, request, Hide())

    def edit_classifier() -> None:
        runner = make_runner(task, Hide(), None, repair=False)
        if runner.classifier is None:
            raise FedOrthoError("the network does not end in a linear layer with one output per class")
        runner.attempt([replace(UNPRUNED, scrub=1.0)])

    on_step("classifier")
    classifier = _reason(edit_classifier)
    methods = {}
    for method in METHODS_OF_OURS:
        on_step(method.name)
        methods[method.name] = _reason(partial(method.plan, known, engine, request))
    if not task.sites:  # the classifier is all that is left to hide
        methods["hide"] = classifier
    on_step("training")
    recipe = Recipe(epochs=1, batch_size=len(few), crop=0, flip=0.0, ortho=0.0)
    return ModelCheck(
        memory_format=str(memory_format_of(known, few.shape)).removeprefix("torch.").removesuffix("_format"),
        layers=trace_structure(known, few.shape).findings,
        edited=tuple(site.name for site in task.sites),
        left_out=task.left_out,
        methods=methods,
        classifier=classifier,
        training=_reason(partial(fit, known, few, recipe)),
    )


def _reason(step: Callable[[], object]) -> str | None:
    try:
        step()
    except FedOrthoError as error:
        return str(error)
    except Exception as error:  # code of others may raise anything
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def _random_images(shape: tuple[int, int, int], num_classes: int) -> Images:
    labels = torch.cat([torch.zeros(FORGET, dtype=torch.int64), torch.arange(RETAIN) % (num_classes - 1) + 1])
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (len(labels), *shape), dtype=torch.uint8, generator=generator)
    return images_from_tensors(pixels, labels, tuple(map(str, range(num_classes))))


def _few_images(images: Images) -> Images:
    """Some of the most frequent class first, then some of the others."""
    label = int(torch.bincount(images.labels).argmax())
    parts = [(images.labels == label).nonzero()[:FORGET], (images.labels != label).nonzero()[:RETAIN]]
    return images.subset(torch.cat(parts).flatten())
