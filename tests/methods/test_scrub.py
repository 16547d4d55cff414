"""SCRUB against a plain loop, and the two settings of a target that it needs."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.engines.central import CentralEngine
from fedortho.errors import BadSetting
from fedortho.methods.scrub import SCRUB
from fedortho.training.batches import plan_steps
from fedortho.training.objectives import Target, TrainingSet

REQUEST = ForgetRequest.parse("class:3")


def divergence(teacher: torch.Tensor, student: torch.Tensor, temperature: float) -> torch.Tensor:
    """T² · mean over images of Σ p log(p / q)."""
    p, q = (torch.softmax(logits / temperature, 1) for logits in (teacher, student))
    return temperature**2 * (p * (p.log() - q.log())).sum(1).mean()


def test_it_is_what_its_min_max_steps_say(digits: Dataset, small_net: nn.Module, engine: CentralEngine) -> None:
    """Two epochs, of which the first one begins with the forget set; momentum starts anew with the second."""
    method = SCRUB(epochs=2, max_epochs=1, lr=0.002, forget_batch_size=48, alpha=0.3, gamma=0.7, seed=5)
    forgot = method(small_net, engine, REQUEST)
    teacher, student = copy.deepcopy(small_net).eval(), copy.deepcopy(small_net)
    gone = digits.train.labels == 3
    forget, retain = digits.train.subset(gone), digits.train.subset(~gone)
    both = [TrainingSet(forget, Target(batch_size=48)), TrainingSet(retain)]
    nothing = torch.zeros(0, dtype=torch.int64)
    first = plan_steps(both, 256, 5, 0, "turns")
    second = [[nothing, *rows] for rows in plan_steps([TrainingSet(retain)], 256, 6, 0, "turns")]
    assert {len(rows) for rows, _ in first if len(rows)} >= {48}
    for steps in (first, second):
        optimiser = torch.optim.SGD(student.parameters(), lr=0.002, momentum=0.9, weight_decay=5e-4)
        student.train()
        for leaving, staying in steps:
            assert not (len(leaving) and len(staying)), "no step has both"
            rows = leaving if len(leaving) else staying
            inputs, labels = retain.normalise(retain.pixels[rows]), retain.store_labels[rows]
            outputs = student(inputs)
            away = divergence(teacher(inputs).detach(), outputs, 4.0)
            loss = -away if len(leaving) else 0.3 * away + 0.7 * functional.cross_entropy(outputs, labels)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    for name, value in student.state_dict().items():
        assert torch.allclose(forgot.state_dict()[name].double(), value.double(), atol=2e-4), name


def test_without_epochs_that_maximise_the_forget_set_is_not_read(
    digits: Dataset, small_net: nn.Module, engine: CentralEngine
) -> None:
    SCRUB(epochs=1, max_epochs=0)(small_net, engine, REQUEST)
    assert engine.tally.images_trained == int((digits.train.labels != 3).sum())


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(BadSetting, match="alpha"):
        SCRUB(alpha=-0.1)
    with pytest.raises(BadSetting, match="temperature"):
        SCRUB(temperature=0.0)
