"""Test images that the model no longer recognises, and images of the retain set that it still does."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.evaluation.case import Case
from fedortho.models.predictions import logits_of
from fedortho.reports.pictures import Example, as_pictures, thumbnail

EXAMPLES = 12  # on each side
SEARCHED = 400  # images of the retain set


def lost_examples(models: Mapping[str, nn.Module], case: Case) -> tuple[Example, ...]:
    """Test images of a forgotten class that the original recognises and the model after does not.

    Images of clients and samples are training images that must be forgotten: a page must not keep them.
    """
    if case.request.kind != "class":
        return ()
    return _examples(models, case.forget_eval, case.device, recognised=False)


def kept_examples(models: Mapping[str, nn.Module], case: Case) -> tuple[Example, ...]:
    """Test images of the retain set, of many classes, that both models recognise."""
    searched = case.retain_test.subset(_interleaved(case.retain_test.labels)[:SEARCHED])
    return _examples(models, searched, case.device, recognised=True)


def _examples(
    models: Mapping[str, nn.Module], images: Images, device: torch.device | str, *, recognised: bool
) -> tuple[Example, ...]:
    if not len(images):
        return ()
    shown = {role: model for role, model in models.items() if role in ("original", "unlearned")}
    predictions = {role: logits_of(model, images, device=device).argmax(1) for role, model in shown.items()}
    chosen = (predictions["unlearned"] == images.labels) == recognised
    if "original" in predictions:
        chosen &= predictions["original"] == images.labels
    places = chosen.nonzero().flatten()
    places = places[_interleaved(images.labels[places])[:EXAMPLES]]
    pixels, names = as_pictures(images.subset(places)), images.names
    return tuple(
        Example(
            thumbnail(pixels[number]),
            names[int(images.labels[place])],
            names[int(predictions["original"][place])] if "original" in predictions else None,
            names[int(predictions["unlearned"][place])],
        )
        for number, place in enumerate(places.tolist())
    )


def _interleaved(labels: Tensor) -> Tensor:
    """Positions of the first image of each class, then of the second, and so on.

    >>> _interleaved(torch.tensor([5, 5, 5, 2, 2])).tolist()
    [0, 3, 1, 4, 2]
    """
    turn = torch.zeros(len(labels), dtype=torch.int64)
    for label in labels.unique().tolist():
        places = (labels == label).nonzero().flatten()
        turn[places] = torch.arange(len(places))
    return turn.argsort(stable=True)
