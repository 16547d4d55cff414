"""A method of your own beside others: python examples/compare_methods.py."""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

import fedortho as fo


@dataclass(frozen=True)
class Deafen:
    """Scale down the classifier's row of the class: it hides the class and erases nothing."""

    name: ClassVar[str] = "deafen"
    kinds: ClassVar[tuple[str, ...]] = ("class",)  # of requests that it serves; others are refused
    roles: ClassVar[str] = "none"
    norms: ClassVar[str] = "untouched"
    factor: float = 0.0

    def __call__(self, model: nn.Module, engine: Any, request: fo.ForgetRequest) -> nn.Module:
        edited = copy.deepcopy(model)
        weight, bias = list(edited.parameters())[-2:]
        with torch.no_grad():
            for label in request.labels(engine.info.class_names):
                weight[label] *= self.factor
                bias[label] = bias.min() - 10
        return edited


def main() -> None:
    data = fo.load_images("digits", valid=0.2)
    recipe = fo.Recipe(epochs=3, batch_size=32, crop=0, flip=0.0)
    fresh = fo.build_model("vgg-mini", num_classes=10, channels=1)
    model = fo.fit(fresh, data.train, recipe)
    request = fo.ForgetRequest.parse("class:3")
    reference = fo.fit(fresh, request.split(data.train)[1], recipe)

    short = {"epochs": 1, "lr": 0.01, "batch_size": 32, "crop": 0, "flip": 0.0}
    for method in (Deafen(), fo.make_method("hide"), fo.make_method("finetune", short)):
        forgot = fo.forget(model, data, request, method).model
        found = fo.accuracies_of(forgot, data, request)
        verdict = fo.judge(forgot, data, request, original=model, reference=reference, only=("C1",))
        print(f"{method.name:9} forget {found.forget:.1%}  retain {found.retain:.1%}  {verdict.audits[0].finding}")


if __name__ == "__main__":
    main()
