"""Images from loaders and datasets: what is read, in which order, and what is refused in one line."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hub import ClassLabel, HubDataset
from PIL import Image
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from fedortho.data.images import collect_images, images_from_tensors, make_dataset
from fedortho.data.loaders import class_names, read_batches
from fedortho.errors import BadData

PIXELS = torch.randint(0, 256, (20, 3, 6, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(20) % 3
FLOATS = PIXELS.float() / 255


class Rows(Dataset[Any]):
    """Any samples by position; as many datasets do, it does not raise IndexError behind the last."""

    classes = ("cat", "dog", "cow")

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> Any:
        return self.samples[place % len(self)]


class Stream(IterableDataset[Any]):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


def pairs(images: Tensor = FLOATS) -> list[tuple[Tensor, int]]:
    return [(image, int(label)) for image, label in zip(images, LABELS, strict=True)]


def pictures(pixels: Tensor = PIXELS) -> list[Image.Image]:
    return [Image.fromarray(image.permute(1, 2, 0).squeeze(2).numpy()) for image in pixels]


def read(source: Any) -> tuple[Tensor, Tensor]:
    images, labels = zip(*read_batches(source, 7), strict=True)
    return torch.cat(images), torch.cat(labels)


FLOAT_SOURCES = {
    "tensors": TensorDataset(FLOATS, LABELS),
    "by position": Rows(pairs()),
    "stream": Stream(pairs()),
    "loader": DataLoader(TensorDataset(FLOATS, LABELS), batch_size=8),
    "loader that shuffles": DataLoader(TensorDataset(FLOATS, LABELS), batch_size=8, shuffle=True, drop_last=True),
    "loader of weighted draws": DataLoader(Rows(pairs()), 8, sampler=WeightedRandomSampler([0.1] * 20, 20)),
    "loader of rows": DataLoader(Rows(pairs()), batch_size=None),
    "loader of a stream": DataLoader(Stream(pairs()), batch_size=8),
    "loader with workers": DataLoader(Rows(pairs()), batch_size=8, num_workers=1),
    "loader of mappings": DataLoader(StackDataset(img=FLOATS, fine_label=LABELS), batch_size=8),
    "loader with its own batches": DataLoader(
        TensorDataset(FLOATS, LABELS), batch_sampler=[[19, 18], *([row] for row in range(18))]
    ),
    "list of batches": [(FLOATS[:8], LABELS[:8]), (FLOATS[8:], LABELS[8:])],
    "double precision": Rows([(image.double().numpy(), np.int64(label)) for image, label in pairs()]),
    "numpy, channels last": Rows([(image.permute(1, 2, 0).numpy(), torch.tensor(label)) for image, label in pairs()]),
}
BYTE_SOURCES = {
    "pictures": Rows(list(zip(pictures(), LABELS.tolist(), strict=True))),
    "loader of pictures": DataLoader(Rows(list(zip(pictures(), LABELS.tolist(), strict=True))), 8, shuffle=True),
    "nested lists": Rows([(image.tolist(), int(label)) for image, label in zip(PIXELS, LABELS, strict=True)]),
}


@pytest.mark.parametrize("kind", FLOAT_SOURCES)
def test_every_kind_of_source_gives_the_same_floats_in_the_order_of_rows(kind: str) -> None:
    images, labels = read(FLOAT_SOURCES[kind])
    assert images.dtype == torch.float32
    assert torch.equal(images, FLOATS)
    assert torch.equal(labels, LABELS)
    assert labels.dtype == torch.int64


@pytest.mark.parametrize("kind", BYTE_SOURCES)
def test_pictures_without_a_transform_give_bytes(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    found = collect_images(BYTE_SOURCES[kind], ("cat", "dog", "cow"))
    expected = images_from_tensors(PIXELS, LABELS)
    assert torch.equal(found.pixels, expected.pixels)
    assert torch.equal(found.labels, expected.labels)
    assert (found.mean, found.std) == (expected.mean, expected.std)
    assert "gives bytes: they are normalised by their own mean and deviation" in caplog.text


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_pictures_of_every_mode_have_one_or_three_channels(mode: str) -> None:
    picture = Image.fromarray(PIXELS[0].permute(1, 2, 0).numpy()).convert("L" if mode in ("1", "LA") else "RGB")
    images, _ = read([(picture.convert(mode), 0)])
    assert images.shape == (1, 1 if mode in ("1", "L", "LA") else 3, 6, 5)


def test_a_loader_of_some_rows_gives_those_rows() -> None:
    chosen = [11, 3, 7]
    for loader in (
        DataLoader(TensorDataset(FLOATS, LABELS), 2, sampler=SubsetRandomSampler(chosen)),
        DataLoader(Subset(TensorDataset(FLOATS, LABELS), sorted(chosen)), 2, shuffle=True),
    ):
        assert torch.equal(read(loader)[0], FLOATS[sorted(chosen)])


def test_reading_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    for source in FLOAT_SOURCES.values():
        if not (isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset)):
            read(source)
    assert torch.equal(torch.get_rng_state(), before)


class Flipping(Rows):
    def __getitem__(self, place: int) -> Any:
        image, label = super().__getitem__(place)
        return (image.flip(2) if torch.rand(()) < 0.5 else image), label


class Shuffling(Stream):
    def __iter__(self) -> Iterator[Any]:
        return (self.samples[place] for place in torch.randperm(len(self.samples)).tolist())


class Once(Stream):
    def __iter__(self) -> Iterator[Any]:
        while self.samples:
            yield self.samples.pop()


@pytest.mark.parametrize(
    "source",
    [
        Flipping(pairs()),
        DataLoader(Flipping(pairs()), 8),
        DataLoader(Flipping(pairs()), 8, num_workers=2),
        DataLoader(Rows(pairs()), 8, collate_fn=lambda rows: (torch.rand(len(rows), 3, 6, 5), LABELS[: len(rows)])),
        Shuffling(pairs()),
        DataLoader(Shuffling(pairs()), 8),
    ],
    ids=["dataset", "loader", "workers", "collation", "stream", "loader of a stream"],
)
def test_what_is_random_is_refused(source: Any) -> None:
    with pytest.raises(BadData, match=r"when read again; pass the data with its evaluation transform"):
        collect_images(source)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Once(pairs()), "Once can be read only once"),
        ({"train": Rows(pairs())}, r"a dict has several splits \(train\); choose one, such as data\['train'\]"),
        (3, "int gives no images; pass Images"),
        (Rows([]), "Rows gives no images"),
        (
            Rows([(FLOATS[0], torch.eye(3)[0])]),
            r"labels of shape \(3,\); expected one whole number per image: give the argmax",
        ),
        ([(FLOATS, torch.eye(3)[LABELS])], r"shape \(20, 3\); expected one whole number per image"),
        (Rows([(FLOATS[0], 1.0)]), r"labels must be whole numbers, not torch\.float32"),
        (Rows([(FLOATS[0], "cat")]), "has a label 'cat'; number the classes from 0"),
        (Rows([(FLOATS[0], None)]), "has a label None"),
        (Rows([FLOATS[0]]), r"must give batches \(images, labels\) or samples \(image, label\), not Tensor"),
        (Rows([(FLOATS[0], 0, 0)]), "not 3 values"),
        (Rows([(FLOATS[0, 0, 0], 0)]), r"image 0 is \(5,\); expected \(channels, height, width\)"),
        (Rows([("a.png", 0)]), "image 0 is a str; expected a tensor, an array or a PIL image"),
        (Rows([(PIXELS[0].int() * 2, 0)]), "whole numbers outside 0 to 255"),
        (Rows([(np.full((8, 8), 3000, np.uint16), 0)]), "whole numbers outside 0 to 255"),
        (Rows([(np.full((8, 8), 2**64 - 1, np.uint64), 0)]), "whole numbers outside 0 to 255"),
        (Rows([(Image.new("I;16", (4, 4)), 0)]), r"image 0 \(mode I;16\) has more than 8 bits per channel"),
        (Rows([(FLOATS[0], 0), (FLOATS[0, :, :4], 1)]), r"image 1 is \(3, 4, 5\), the first \(3, 6, 5\); resize"),
        (
            DataLoader(Rows([(FLOATS[0], 0), (FLOATS[0, :, :4], 1)]), 2, shuffle=True),
            r"DataLoader has images of unequal size: image 1 is \(3, 4, 5\)",
        ),
        ([(FLOATS[:2], LABELS[:3])], "2 images and 3 labels"),
        ([{"picture": FLOATS[0], "label": 0}], "has the columns picture, label; expected one of image, img"),
        (Rows([(FLOATS[0], -1)]), "row 0 has label -1"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(source: Any, message: str) -> None:
    with pytest.raises(BadData, match=message) as caught:
        collect_images(source)
    assert "\n" not in str(caught.value)


def hub(**columns: list[Any]) -> HubDataset:
    features = {"img": object(), "fine_label": ClassLabel(["cat", "dog", "cow"]), "coarse_label": ClassLabel(["pet"])}
    return HubDataset({"coarse_label": [0] * 20, "fine_label": LABELS.tolist(), "img": pictures(), **columns}, features)


def test_hugging_face_datasets_in_every_format_give_the_same_bytes_and_their_class_names() -> None:
    for source in (hub(), hub().with_format("torch"), hub().with_format("numpy"), DataLoader(hub(), 6, shuffle=True)):
        found = collect_images(source)
        assert torch.equal(found.pixels, PIXELS)
        assert torch.equal(found.labels, LABELS)
        assert found.names == ("cat", "dog", "cow")


def test_grey_images_may_come_without_a_dimension_of_channels() -> None:
    for grey in (FLOATS[:, 0], PIXELS[:, 0], PIXELS[:, 0, :3]):
        for samples in (pairs(grey), [(image.numpy(), label) for image, label in pairs(grey)]):
            assert torch.equal(collect_images(Rows(samples)).pixels, grey[:, None])


def test_the_transform_of_a_hugging_face_dataset_is_applied() -> None:
    def transformed(batch: dict[str, list[Any]]) -> dict[str, Any]:
        tensors = [torch.tensor(np.array(picture)).permute(2, 0, 1) / 255 for picture in batch["img"]]
        return {"pixel_values": tensors, "labels": batch["fine_label"]}

    assert torch.equal(collect_images(hub().with_transform(transformed)).pixels, FLOATS)


def test_class_names_are_those_of_the_dataset_behind_loaders_and_subsets() -> None:
    assert class_names(DataLoader(Subset(Rows(pairs()), [0, 1]))) == ("cat", "dog", "cow")
    assert class_names(TensorDataset(FLOATS, LABELS)) is None


def test_test_images_are_normalised_as_the_training_images() -> None:
    train, test = Rows(pairs(PIXELS)), Rows(pairs(PIXELS // 2))
    data = make_dataset(train, test, valid=test)
    assert (data.test.mean, data.test.std) == (data.valid.mean, data.valid.std) == (data.train.mean, data.train.std)
    assert len(data.train) == 20
    with pytest.raises(BadData, match="some images are bytes and some are floats"):
        make_dataset(train, Rows(pairs()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_floats_of_every_precision_are_read_in_single(dtype: torch.dtype) -> None:
    images, _ = read([(FLOATS.to(dtype), LABELS)])
    assert images.dtype == torch.float32
    assert torch.equal(images, FLOATS.to(dtype).float())
