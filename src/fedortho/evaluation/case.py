"""The models and images that metrics and audits compare."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedortho.data.images import Dataset, Images
from fedortho.data.request import Clients, ForgetRequest
from fedortho.errors import BadData
from fedortho.statistics.query import draw


@dataclass(frozen=True)
class Case:
    """The models and images of an audit; none of them is modified."""

    forgot: nn.Module
    original: nn.Module
    reference: nn.Module | None  # retrained without what had to go
    second: nn.Module | None  # retrained likewise by another seed: what a difference between two of them is worth
    data: Dataset
    request: ForgetRequest
    forgotten: ForgetRequest | None = None  # by earlier requests: not retained either
    clients: Clients | None = None  # rows of each client, for requests about clients
    device: torch.device | str = "cpu"
    seed: int = 0

    @property
    def everything(self) -> ForgetRequest:
        """This request and all before it."""
        return self.request if self.forgotten is None else self.forgotten + self.request

    @cached_property
    def gone_train(self) -> Images:
        """The training images that had to be forgotten."""
        return self.data.train.subset(self.request.mask(self.data.train, self.clients))

    @cached_property
    def kept_train(self) -> Images:
        """The training images that stay."""
        return self.data.train.subset(~self.everything.mask(self.data.train, self.clients))

    @cached_property
    def judged(self) -> Images:
        """What forget accuracy is measured on: of a class its test images, of clients and samples their images."""
        if self.request.kind != "class":
            return self.gone_train
        return self.data.test.subset(self.request.mask(self.data.test))

    @cached_property
    def kept_test(self) -> Images:
        """Test images of the classes that stay."""
        gone = ForgetRequest(self.everything.classes)
        return self.data.test.subset(~gone.mask(self.data.test)) if gone.classes else self.data.test

    def unseen(self, like: Tensor, most: int = 0) -> Images:
        """Test images of the kind of the forgotten ones, whose labels are given; at most so many, 0: all there are.

        Of a class its own. For clients and samples every label has the share that it has among `like`, or else labels
        would be told apart and not members; classes that were forgotten before are left out.
        """
        test = self.data.test
        if self.request.kind == "class":
            return draw(test.subset(self.request.mask(test)), most, self.seed)
        rest = test if self.forgotten is None else test.subset(~ForgetRequest(self.forgotten.classes).mask(test))
        numbers = matched(like, rest.labels, most)
        drawn = [draw(rest.subset(rest.labels == label), number, self.seed) for label, number in numbers.items()]
        return replace(test, rows=torch.cat([part.rows for part in drawn]).sort().values)


def matched(like: Tensor, there: Tensor, most: int = 0) -> dict[int, int]:
    """How many images of each label to take so that shares are those of `like`; at least one of each that is there.

    >>> matched(torch.tensor([7, 7, 7, 2]), torch.tensor([7] * 6 + [2] * 9 + [5] * 9))
    {2: 2, 7: 6}
    """
    labels = [label for label in like.unique().tolist() if bool((there == label).any())]
    if not labels:
        raise BadData(
            "no test image has a label of the images that had to go; there is nothing like them to compare with"
        )
    wanted = {label: int((like == label).sum()) for label in labels}
    each = min(int((there == label).sum()) / number for label, number in wanted.items())
    each = min(each, most / sum(wanted.values())) if most else each
    return {label: max(round(each * number), 1) for label, number in wanted.items()}
