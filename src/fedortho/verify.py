"""What a model still knows: forget, retain and test accuracy, as the paper defines them."""

from dataclasses import dataclass

import torch
from torch import nn

from fedortho.data import Dataset, Images
from fedortho.request import ForgetRequest
from fedortho.train import accuracy


@dataclass(frozen=True)
class Verdict:
    """Accuracies as shares, 0 to 1.

    Class requests: test images of the classes that had to go, and of the others. Client and sample requests:
    the training images that had to go, and the whole test set.
    """

    forget: float
    retain: float
    test: float  # all test images


def judge(
    model: nn.Module,
    data: Dataset,
    request: ForgetRequest | str,
    *,
    forgotten: ForgetRequest | None = None,
    device: torch.device | str = "cpu",
) -> Verdict:
    """Measure a model on the test images; what earlier requests removed (`forgotten`) is not retained either."""
    if isinstance(request, str):
        request = ForgetRequest.parse(request)
    everything = request if forgotten is None else forgotten + request

    def score(images: Images) -> float:
        return accuracy(model, images, device=device)

    test = score(data.test)
    classes = ForgetRequest(classes=everything.classes)
    gone = classes.mask(data.test) if everything.classes else torch.zeros(len(data.test), dtype=torch.bool)
    retain = score(data.test.subset((~gone).nonzero().flatten()))
    if request.kind == "class":
        forget = score(data.test.subset(ForgetRequest(classes=request.classes).mask(data.test).nonzero().flatten()))
    else:
        forget = score(request.split(data.train)[0])
    return Verdict(forget, retain, test)
