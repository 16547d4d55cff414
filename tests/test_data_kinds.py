"""Every call that takes images takes loaders and datasets, and answers to the bit as for Images of the same pixels."""

import copy
from typing import Any

import pytest
import torch
from hub import ClassLabel, HubDataset
from PIL import Image
from small import TinyNet
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, StackDataset, TensorDataset

import fedortho as fo
from fedortho.errors import BadCheckpoint, BadData, UnknownName
from fedortho.storage.files import tensors_digest

RECIPE = fo.Recipe(epochs=1, batch_size=32, lr=0.05, crop=0, flip=0.0)


class Stream(IterableDataset[Any]):
    def __init__(self, pixels: Tensor, labels: Tensor) -> None:
        self.rows = list(zip(pixels, labels.tolist(), strict=True))

    def __iter__(self) -> Any:
        return iter(self.rows)


def hub(pixels: Tensor, labels: Tensor) -> HubDataset:
    columns = {"image": list(pixels), "label": labels.tolist()}
    if pixels.dtype == torch.uint8:
        columns["image"] = [Image.fromarray(image[0].numpy()) for image in pixels]
    return HubDataset(columns, {"image": object(), "label": ClassLabel(["0", "1", "2", "3"])})


KINDS = {
    "loader": lambda *of: DataLoader(TensorDataset(*of), batch_size=500),
    "loader that shuffles": lambda *of: DataLoader(TensorDataset(*of), batch_size=500, shuffle=True),
    "loader of mappings": lambda *of: DataLoader(StackDataset(image=of[0], label=of[1]), batch_size=500),
    "dataset": TensorDataset,
    "stream": Stream,
    "hugging face": hub,
    "hugging face, torch": lambda *of: hub(*of).with_format("torch"),
    "hugging face in a loader": lambda *of: DataLoader(hub(*of), batch_size=500, shuffle=True),
}  # fmt: skip


def answers(model: TinyNet, train: Any, test: Any, evaluated: Any) -> dict[str, Any]:
    """What every call says of a model and data."""
    data = {"train": train, "test": test}
    forgot = fo.forget(model, train, "class:1 samples:4,6", "ssd")
    metrics = fo.judge(forgot.model, data, "class:1", original=model, audit="none").metrics
    return {
        "fit": tensors_digest(fo.fit(model, train, RECIPE, valid=evaluated).state_dict()),
        "forget": forgot.patch.after,
        "plan": fo.plan(model, train, "class:1", "paper").patch.after,
        "judge": [(metric.name, metric.value, metric.error) for metric in metrics],
        "evaluate": fo.evaluate(model, evaluated),
        "accuracies_of": fo.accuracies_of(model, data, "class:1"),
        "make_dataset": [part.rows.tolist() for part in vars(fo.make_dataset(train)).values() if hasattr(part, "rows")],
    }


@pytest.fixture(scope="module")
def splits() -> list[tuple[Tensor, Tensor]]:
    """Bytes and labels to train on and to test on: noise, brighter from class to class."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(48) % 4
    pixels = torch.randint(0, 120, (2, 48, 1, 8, 8), generator=generator) + 40 * labels.view(-1, 1, 1, 1)
    return [(part.to(torch.uint8), labels) for part in pixels]


@pytest.fixture(scope="module")
def expected(splits: list[tuple[Tensor, Tensor]]) -> tuple[TinyNet, fo.Images, dict[str, Any]]:
    """A model, test images normalised as the training images, and what every call says of Images."""
    torch.manual_seed(3)
    model, images = TinyNet(), [fo.images_from_tensors(*split) for split in splits]
    test = fo.make_dataset(*images).test
    return model, test, answers(model, *images, evaluated=test)


@pytest.mark.parametrize("kind", ["loader that shuffles", "hugging face", "hugging face, torch"])
def test_every_call_answers_as_for_images_of_the_same_bytes(kind: str, splits: Any, expected: Any) -> None:
    model, test, said = expected
    assert answers(model, *(KINDS[kind](*split) for split in splits), evaluated=test) == said


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hugging face, torch"])  # which has bytes only
def test_every_call_answers_as_for_images_of_the_same_floats(kind: str, splits: Any, expected: Any) -> None:
    model, test, said = expected
    train, tested = (KINDS[kind](test.normalise(pixels), labels) for pixels, labels in splits)
    assert answers(model, train, tested, evaluated=tested) == said


def test_bytes_are_not_evaluated_without_the_normalisation_of_training(toy: fo.Images, tiny: TinyNet) -> None:
    with pytest.raises(BadData, match="images must be floats, normalised as in training"):
        fo.evaluate(tiny, TensorDataset(toy.pixels, toy.labels))


def test_splits_that_nobody_knows_are_refused(toy: fo.Images, tiny: TinyNet) -> None:
    with pytest.raises(UnknownName, match="no split 'tests'; did you mean 'test'"):
        fo.forget(tiny, {"train": toy, "tests": toy}, "class:1")
    with pytest.raises(BadData, match="the data has only test; expected train"):
        fo.forget(tiny, {"test": toy}, "class:1")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_model_is_refused_also_if_its_architecture_is_known(
    toy: fo.Images, tiny: TinyNet, value: float
) -> None:
    fo.forget(tiny, toy, "class:1", method=fo.make_method("hide", {"ratio": 0.2}))
    broken = copy.deepcopy(tiny)
    with torch.no_grad():
        broken.features[0].weight[0, 0, 0, 0] = value
    with pytest.raises(BadCheckpoint, match=r"features.0.weight has values that are NaN or infinite"):
        fo.forget(broken, toy, "class:1", method="hide")
