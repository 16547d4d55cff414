"""The models and images that metrics and audits compare."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from fedortho.data.images import Dataset, Images
from fedortho.data.request import Clients, ForgetRequest
from fedortho.engines.query import draw
from fedortho.errors import BadData, BadSetting
from fedortho.evaluation.accuracies import forget_eval_images
from fedortho.evaluation.shadows import ShadowPlan

REFERENCES = ("reference", "second_reference", "third_reference")  # roles
COUNTERFACTUALS = ("counterfactual", "second_counterfactual", "third_counterfactual")  # what became of each


@dataclass(frozen=True)
class Case:
    """An unlearned model, the models it is compared with, and their data; none of them is modified."""

    unlearned: nn.Module
    original: nn.Module
    references: tuple[nn.Module, ...]  # retrained without the forget set, each with another seed; at most three
    data: Dataset
    request: ForgetRequest
    forgotten: ForgetRequest | None = None  # earlier requests: their images are not in the retain set
    clients: Clients | None = None  # rows of each client, for client requests
    device: torch.device | str = "cpu"
    seed: int = 0
    shadows: ShadowPlan | None = None  # shadow models of the membership audit; None: it is not run
    counterfactuals: tuple[nn.Module, ...] = ()  # what the method makes of the reference models; it saw no forget set

    @property
    def treated_alike(self) -> "Case":
        """The case with counterfactuals, if any, as reference models: what the method itself leaves is no trace."""
        return replace(self, references=self.counterfactuals, counterfactuals=()) if self.counterfactuals else self

    @property
    def models(self) -> dict[str, nn.Module]:
        """The models that are compared, by role; the first reference model is called `reference`."""
        if len(self.references) > len(REFERENCES):
            raise BadSetting(f"{len(self.references)} reference models are given; expected at most {len(REFERENCES)}")
        roles = ("unlearned", "original", *REFERENCES)
        return dict(zip(roles, (self.unlearned, self.original, *self.references), strict=False))

    @property
    def all_requests(self) -> ForgetRequest:
        """This request and all earlier ones."""
        return self.request if self.forgotten is None else self.forgotten + self.request

    @cached_property
    def forget_train(self) -> Images:
        """The forget set: training images that match the request."""
        return self.data.train.subset(self.request.mask(self.data.train, self.clients))

    @cached_property
    def retain_train(self) -> Images:
        """The retain set: training images that match neither this request nor an earlier one."""
        return self.data.train.subset(~self.all_requests.mask(self.data.train, self.clients))

    @cached_property
    def deleted(self) -> int:
        """How many images of the forget set were deleted since."""
        gone = replace(self.data.train, rows=self.data.gone)
        return int(self.request.mask(gone, self.clients).sum()) if len(gone) else 0

    @cached_property
    def forget_eval(self) -> Images:
        """The images on which forget accuracy is measured."""
        return forget_eval_images(self.data, self.request, self.clients)

    @cached_property
    def retain_test(self) -> Images:
        """Test images of the retained classes."""
        classes = ForgetRequest(self.all_requests.classes)
        return self.data.test.subset(~classes.mask(self.data.test)) if classes.classes else self.data.test

    @property
    def retains_one_class(self) -> bool:
        """Whether a model that always gives the same answer has full retain accuracy."""
        return len(self.retain_test.labels.unique()) == 1

    def unseen_like(self, labels: Tensor, limit: int = 0) -> Images:
        """At most `limit` test images (0: all) comparable with forgotten images of these labels.

        For a class, its test images. For clients and samples every label has the same share as in `labels`; otherwise
        an attack could tell labels apart instead of members. Classes of earlier requests are left out.
        """
        test = self.data.test
        if self.request.kind == "class":
            return draw(test.subset(self.request.mask(test)), limit, self.seed)
        rest = test if self.forgotten is None else test.subset(~ForgetRequest(self.forgotten.classes).mask(test))
        numbers = proportional_counts(labels, rest.labels, limit)
        drawn = [draw(rest.subset(rest.labels == label), number, self.seed) for label, number in numbers.items()]
        return replace(test, rows=torch.cat([part.rows for part in drawn]).sort().values)


def proportional_counts(wanted: Tensor, available: Tensor, limit: int = 0) -> dict[int, int]:
    """How many available images of each label to take so that shares are those of `wanted`; at least one of each.

    >>> proportional_counts(torch.tensor([7, 7, 7, 2]), torch.tensor([7] * 6 + [2] * 9 + [5] * 9))
    {2: 2, 7: 6}
    """
    labels = [label for label in wanted.unique().tolist() if bool((available == label).any())]
    if not labels:
        raise BadData("no test image has a label of the forget set; there are no comparable images")
    counts = {label: int((wanted == label).sum()) for label in labels}
    factor = min(int((available == label).sum()) / count for label, count in counts.items())
    factor = min(factor, limit / sum(counts.values())) if limit else factor
    return {label: max(round(factor * count), 1) for label, count in counts.items()}
