"""The images that metrics are measured on, and one model's outputs for them, computed once."""

import copy
from dataclasses import replace
from functools import cache, cached_property

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.query import draw
from fedortho.errors import BadSetting
from fedortho.evaluation import membership_attacks
from fedortho.evaluation.case import Case
from fedortho.evaluation.membership_attacks import Predictions
from fedortho.models.capture import capture
from fedortho.models.layout import memory_format_of
from fedortho.models.predictions import evaluating, logits_of
from fedortho.models.split import find_classifier

SAMPLE = 2500  # images of a set that is only sampled
MIN_CLIENT_IMAGES = 20  # sampled images of each client, if it has that many


class EvaluationSets:
    """The sets of images that metrics are measured on (forget, retain, test, clients), drawn once for all models."""

    def __init__(self, case: Case, limit: int = SAMPLE) -> None:
        self.case, self.limit = case, limit

    def images(self, name: str) -> Images:
        if name == "clients":
            return replace(self.case.data.train, rows=torch.cat([part.rows for part in self.clients.values()]))
        if name == "test":
            return self.case.data.test
        return self.forget if name == "forget" else self.retain

    @cached_property
    def forget(self) -> Images:
        """The forget set; for a class a sample, since its forget accuracy is measured on test images."""
        forget = self.case.forget_train
        return draw(forget, self.limit, self.case.seed) if self.case.request.kind == "class" else forget

    @property
    def retain(self) -> Images:
        """Known members: a sample of the retain set, in each class as many as known non-members."""
        return self.case.retain_train.subset(self._known[0])

    @property
    def non_members(self) -> Tensor:
        """Known non-members: positions of test images of retained classes."""
        return (~self.test_mask(self.case.all_requests)).nonzero().flatten()[self._known[1]]

    @cached_property
    def _known(self) -> tuple[Tensor, Tensor]:
        return membership_attacks.match_members(
            self.case.retain_train.labels, self.case.retain_test.labels, self.limit, self.case.seed
        )

    @cached_property
    def unseen(self) -> Tensor:
        """Test images with the labels of the forget set, as a mask."""
        return torch.isin(self.case.data.test.rows, self.case.unseen_like(self.case.forget_train.labels).rows)

    def test_mask(self, request: ForgetRequest) -> Tensor:
        """Test images of the classes in a request."""
        return ForgetRequest(request.classes).mask(self.case.data.test)

    @cached_property
    def clients(self) -> dict[int, Images]:
        """A sample of the retain set of each remaining client."""
        rows, retain = self.case.clients or {}, self.case.retain_train
        remaining = [client for client in rows if client not in self.case.all_requests.clients]
        share = max(self.limit // max(len(remaining), 1), MIN_CLIENT_IMAGES)
        held = {client: retain.subset(torch.isin(retain.rows, rows[client])) for client in remaining}
        return {client: draw(images, share, client) for client, images in held.items() if len(images)}


class ModelOutputs:
    """One model's predictions and features on the evaluation sets; each set passes through the model once."""

    def __init__(self, name: str, model: nn.Module, sets: EvaluationSets) -> None:
        self.name, self.sets = name, sets
        self.model = copy.deepcopy(model).to(sets.case.device).eval()
        self.attack, self._forward = cache(self._attack), cache(self._outputs)

    def _outputs(self, of: str) -> tuple[Tensor, Tensor | None]:
        names, images = [] if self._classifier is None else [self._classifier], self.sets.images(of)
        memory_format_of(self.model, images.shape)  # tries the network where it is new: not inside the capture
        with capture(self.model, names, lambda inputs: inputs.cpu().double(), inputs=True) as captured:
            logits = logits_of(self.model, images, device=self.sets.case.device)
        return logits, torch.cat(captured[names[0]]) if names else None

    @cached_property
    def _classifier(self) -> str | None:
        """The linear layer that outputs the logits; None if there is no such layer."""
        test = self.sets.case.data.test
        with evaluating(self.model):
            example = test.normalise(test.pixels[test.rows[:2]].to(self.sets.case.device))
            return find_classifier(self.model, test.classes, example)

    def predictions(self, of: str, positions: Tensor | None = None) -> Predictions:
        """Predictions for a set, or for some of its images; NaN and infinity are refused."""
        whole = membership_attacks.predictions_from(
            self._forward(of)[0], self.sets.images(of).labels, f"{self.name}, {of} images"
        )
        return whole if positions is None else whole.take(positions)

    def features(self, of: str) -> Tensor:
        """The classifier's inputs on a set."""
        features = self._forward(of)[1]
        if features is None:
            raise BadSetting(f"{self.name} does not end in a linear layer; its features cannot be compared")
        return features

    @cached_property
    def attacked(self) -> Predictions:
        """Predictions for the images of the forget set that membership attacks guess about."""
        predictions = self.predictions("forget")
        order = torch.randperm(len(predictions), generator=torch.Generator().manual_seed(self.sets.case.seed))
        return predictions.take(order[: self.sets.limit])

    def _attack(self, name: str) -> membership_attacks.AttackResult:
        known = membership_attacks.KnownImages(
            self.predictions("retain"), self.predictions("test", self.sets.non_members)
        )
        return membership_attacks.ATTACKS[name](self.attacked, known, seed=self.sets.case.seed)
