import pytest
import torch
from small import TinyNet

from fedortho.data.images import Images, images_from_tensors, make_dataset
from fedortho.data.request import ForgetRequest
from fedortho.errors import BadData
from fedortho.evaluation.accuracies import accuracies_of
from fedortho.models.predictions import accuracy


def test_accuracies_are_those_of_the_right_images(tiny: TinyNet, toy: Images) -> None:
    data = make_dataset(toy, toy.subset(range(1, 240, 2)))
    test = data.test

    def of(chosen: torch.Tensor) -> float:
        return accuracy(tiny, test.subset(chosen))

    by_class = accuracies_of(tiny, data, "class:1")
    assert by_class.forget == pytest.approx(of(test.labels == 1))
    assert by_class.retain == pytest.approx(of(test.labels != 1))
    assert by_class.test == pytest.approx(accuracy(tiny, test))
    rows = data.train.rows[:30]
    by_sample = accuracies_of(tiny, data, ForgetRequest(samples=tuple(map(str, rows.tolist()))))
    assert by_sample.forget == pytest.approx(accuracy(tiny, data.train.subset(range(30))))
    assert by_sample.retain == by_sample.test


def test_classes_forgotten_before_are_not_retained(tiny: TinyNet, toy: Images) -> None:
    data = make_dataset(toy, toy)
    twice = accuracies_of(tiny, data, "class:1", forgotten=ForgetRequest.parse("class:3"))
    kept = (toy.labels != 1) & (toy.labels != 3)
    assert twice.retain == pytest.approx(accuracy(tiny, toy.subset(kept)))


def test_nothing_to_judge_by_is_refused(tiny: TinyNet, toy: Images) -> None:
    test = images_from_tensors(toy.pixels[toy.labels != 2], toy.labels[toy.labels != 2], toy.names)
    with pytest.raises(BadData, match=r"labels.*put images of these classes into the test split"):
        accuracies_of(tiny, make_dataset(toy, test), "class:2")
