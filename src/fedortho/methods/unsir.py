"""UNSIR: train on error-maximising noise labelled as the class, then repair (Tarun et al., TNNLS 2023)."""

import copy
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedortho.data.images import Images, made_images
from fedortho.data.request import ForgetRequest
from fedortho.engines.engine import Engine, PlanPart, TrainingPlan
from fedortho.methods.method import Schedule, forget_and_retain
from fedortho.storage.settings import Count, Number
from fedortho.training.objectives import FitOptions


@dataclass(frozen=True)
class UNSIR(Schedule):
    """Impair and repair without images of the class (arXiv:2111.08947; EMNI in the FedOrtho paper).

    Noise images minimise −CE(f(N), c) + 0.1 · mean Σ N² with Adam. Impairing epochs train on the noise, labelled as
    class c, mixed with retain images; repairing epochs train on retain images only. All noise images are distinct, as
    in the paper; an indexing error leaves the published code with 3 (`noise_images=3`). The network is in evaluation
    mode while the noise is optimised. Retain images are drawn at random, `retain_images` per class on average.
    """

    name: ClassVar[str] = "unsir"
    kinds: ClassVar[tuple[str, ...]] = ("class",)
    needs: ClassVar[str] = "retain: a few thousand images, two short trainings"
    has_counterfactual: ClassVar[bool] = True
    norms: ClassVar[str] = "unchanged while noise is optimised, then updated by training, noise included"
    epochs: Annotated[int, "impairing and repairing epochs each; in a federation rounds"] = 1
    lr: Annotated[float, "learning rate of Adam while impairing"] = 0.02
    repair_lr: Annotated[float, "learning rate of Adam while repairing"] = 0.01
    batch_size: Annotated[int, "images per step"] = 256
    weight_decay: Annotated[float, "weight decay"] = 0.0
    noise_images: Annotated[Number, "distinct noise images per class"] = 256
    noise_copies: Annotated[Number, "repetitions of each noise image in an impairing epoch"] = 20
    noise_steps: Annotated[Count, "optimisation steps of the noise"] = 40
    noise_lr: Annotated[float, "learning rate of Adam for the noise"] = 0.1
    retain_images: Annotated[Number, "retain images used, per class on average"] = 1000

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        labels = request.labels(engine.info.class_names)
        retain = replace(retain, limit=self.retain_images * (len(engine.info.class_names) - len(labels)))
        noise = torch.cat([self.make_noise(model, label, engine.info.image_shape) for label in labels])
        engine.tally.images_trained += self.noise_steps * len(noise)  # made here, without anybody's images
        images = self._noise_images(noise, labels, engine.info.class_names)
        adam, repairing = FitOptions(optimiser="adam"), replace(self.recipe, lr=self.repair_lr)
        impaired = engine.fit(model, TrainingPlan((PlanPart(given=images), PlanPart(retain)), adam), self.recipe)
        return engine.fit(impaired, TrainingPlan((PlanPart(retain),), adam), repairing)

    def make_noise(self, model: nn.Module, label: int, shape: tuple[int, int, int]) -> Tensor:
        """Noise images, in the normalised input space, that maximise the model's loss for this label."""
        twin = copy.deepcopy(model).cpu().eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(self.seed + label)
        noise = torch.randn(self.noise_images, *shape, generator=generator).requires_grad_()
        optimiser = torch.optim.Adam([noise], lr=self.noise_lr)
        labels = torch.full((self.noise_images,), label)
        for _ in range(self.noise_steps):
            loss = 0.1 * noise.square().sum((1, 2, 3)).mean() - functional.cross_entropy(twin(noise), labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return noise.detach()

    def _noise_images(self, noise: Tensor, labels: list[int], names: tuple[str, ...]) -> Images:
        made = made_images(noise, torch.tensor(labels).repeat_interleave(self.noise_images), names)
        return replace(made, rows=made.rows.repeat(self.noise_copies))
