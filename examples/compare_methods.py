"""A method of one's own beside those that are there: python examples/compare_methods.py."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import fedortho as fo
from fedortho.audits import run_audits
from fedortho.engines.central import CentralEngine
from fedortho.evaluation.case import Case
from fedortho.methods import make_method, unlearn
from fedortho.methods.method import Method, forget_and_retain
from fedortho.statistics.engine import Engine


@dataclass(frozen=True)
class Deafen:
    """Turn the classifier's row of the class down: hides, and erases nothing."""

    name: ClassVar[str] = "deafen"
    kinds: ClassVar[tuple[str, ...]] = ("class",)
    roles: ClassVar[str] = "none"
    norms: ClassVar[str] = "untouched"
    factor: float = 0.0

    def __call__(self, model: nn.Module, engine: Engine, request: fo.ForgetRequest) -> nn.Module:
        forget_and_retain(self, engine, request)  # refuses what it cannot serve
        quiet = copy.deepcopy(model)
        weight, bias = list(quiet.parameters())[-2:]
        with torch.no_grad():
            for label in request.labels(engine.names):
                weight[label] *= self.factor
                bias[label] = bias.min() - 10
        return quiet


def main() -> None:
    data = fo.load_images("digits", valid=0.2)
    recipe = fo.Recipe(epochs=3, batch_size=32, crop=0, flip=0.0)
    fresh = fo.build_model("vgg-mini", num_classes=10, channels=1)
    model = fo.fit(fresh, data.train, recipe)
    request = fo.ForgetRequest.parse("class:3")
    never = fo.fit(fresh, request.split(data.train)[1], recipe)

    short = {"epochs": 1, "lr": 0.01, "batch_size": 32, "crop": 0, "flip": 0.0}
    methods: list[Method] = [Deafen(), make_method("hide"), make_method("finetune", short)]
    for method in methods:
        forgot = unlearn(model, CentralEngine(data), request, method).model
        probe = run_audits(Case(forgot, model, never, None, data, request), only=["C1"])[0]
        found = fo.accuracies_of(forgot, data, request)
        print(f"{method.name:9} forget {found.forget:.1%}  retain {found.retain:.1%}  {probe.says}")


if __name__ == "__main__":
    main()
