"""Forget, retain and test accuracy, as the paper defines them."""

import torch
from torch import Tensor, nn

from fedortho.data.images import Dataset, Images
from fedortho.data.request import Clients, ForgetRequest, as_request
from fedortho.errors import BadData
from fedortho.methods import Data, as_dataset
from fedortho.models.predictions import accuracy, evaluate
from fedortho.runs.record import Accuracies


def forget_eval_images(data: Dataset, request: ForgetRequest, clients: Clients | None = None) -> Images:
    """The test images of forgotten classes; of clients and samples, which have no test images, the training images."""
    if request.kind == "class":
        return data.test.subset(request.mask(data.test))
    return data.train.subset(request.mask(data.train, clients))


def share_correct(scores: Tensor, labels: Tensor) -> float:
    """The share of images whose largest score (logit or probability), (n, classes), is that of their label, (n,).

    >>> share_correct(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
    0.5
    """
    if not len(labels):
        raise BadData("there are no images to measure accuracy on")
    return float((scores.argmax(1) == labels).double().mean())  # on the CPU


def accuracies_of(
    model: nn.Module,
    data: Data,
    request: ForgetRequest | str,
    *,
    forgotten: ForgetRequest | None = None,
    clients: Clients | None = None,
    device: torch.device | str = "cpu",
    forget: float | None = None,
) -> Accuracies:
    """The accuracies of a model; classes removed by earlier requests (`forgotten`) are not in the retain set either.

    `clients` maps each client of a federation to its rows. If the images of a client request are not on this machine,
    `forget` is the accuracy that the clients report.
    """
    data = as_dataset(data)
    request = as_request(request, data)
    excluded = (request if forgotten is None else forgotten + request).labels(data.test.names)
    table = torch.tensor(evaluate(model, data.test, device=device).confusion)  # [true label][predicted label]
    correct, number = table.diagonal(), table.sum(1)
    retained = [label for label in range(len(table)) if label not in excluded]
    retain, test = _share(correct[retained], number[retained]), _share(correct, number)
    if request.kind == "class":  # the images of forget_eval_images, counted in the same pass
        labels = request.labels(data.test.names)
        return Accuracies(_share(correct[labels], number[labels]), retain, test)
    if forget is None:
        forget = accuracy(model, request.split(data.train, clients, gone=data.gone)[0], device=device)
    return Accuracies(forget, retain, test)


def _share(correct: Tensor, number: Tensor) -> float:
    if not int(number.sum()):
        what = "no test image has the requested labels; there is nothing to measure accuracy on"
        raise BadData(f"{what}; put images of these classes into the test split")
    return int(correct.sum()) / int(number.sum())
