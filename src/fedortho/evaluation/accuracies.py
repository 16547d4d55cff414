"""What a model still knows: forget, retain and test accuracy, as the paper defines them."""

import torch
from torch import Tensor, nn

from fedortho.data.images import Dataset
from fedortho.data.request import Clients, ForgetRequest
from fedortho.errors import BadData
from fedortho.models.predictions import accuracy, evaluate
from fedortho.runs.record import Accuracies


def accuracies_of(
    model: nn.Module,
    data: Dataset,
    request: ForgetRequest | str,
    *,
    forgotten: ForgetRequest | None = None,
    clients: Clients | None = None,
    device: torch.device | str = "cpu",
    forget: float | None = None,
) -> Accuracies:
    """Measure a model on the test images; what earlier requests removed (`forgotten`) is not retained either.

    `clients` are the rows that each client of a federation holds, for requests about clients; where these images
    are not here, `forget` is what their holders say.
    """
    if isinstance(request, str):
        request = ForgetRequest.parse(request)
    everything = request if forgotten is None else forgotten + request
    table = torch.tensor(evaluate(model, data.test, device=device).confusion)  # [true label][answer]
    right, number = table.diagonal(), table.sum(1)
    gone = everything.labels(data.test.names)
    kept = [label for label in range(len(table)) if label not in gone]
    retain, test = _share(right[kept], number[kept]), _share(right, number)
    if request.kind == "class":
        asked = request.labels(data.test.names)
        return Accuracies(_share(right[asked], number[asked]), retain, test)
    if forget is None:
        forget = accuracy(model, request.split(data.train, clients)[0], device=device)
    return Accuracies(forget, retain, test)


def _share(right: Tensor, number: Tensor) -> float:
    if not int(number.sum()):
        raise BadData("no test image has the labels that are asked for; there is nothing to judge by")
    return int(right.sum()) / int(number.sum())
