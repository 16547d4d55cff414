"""Images, their statistics and splits, and batches for evaluation."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedortho.data.images import (
    Images,
    channel_statistics,
    evaluation_batches,
    images_from_tensors,
    make_dataset,
    split_stratified,
)
from fedortho.errors import BadData, BadSetting


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def toy(number: int = 20, channels: int = 3) -> Images:
    pixels = torch.randint(0, 256, (number, channels, 6, 5), dtype=torch.uint8, generator=seeded())
    return images_from_tensors(pixels, torch.arange(number) % 4)


def floats(number: int, height: int = 8, width: int = 8, channels: int = 3) -> Tensor:
    return torch.rand(number, channels, height, width, generator=seeded()) + 1  # never 0, the colour of padding


def test_a_subset_of_a_subset_counts_positions_and_keeps_store_rows() -> None:
    images = toy()
    part = images.subset([3, 5, 7, 9]).subset(torch.tensor([1, 3]))
    assert part.rows.tolist() == [5, 9]
    assert part.labels.tolist() == [1, 1]
    assert len(part) == 2
    assert part.pixels.data_ptr() == images.pixels.data_ptr()
    assert images.rows.tolist() == list(range(20))


def test_a_mask_chooses_where_it_is_true_and_must_fit() -> None:
    images = toy().subset(range(4, 20))
    assert images.subset(images.labels == 3).rows.tolist() == [7, 11, 15, 19]
    assert images.subset([True] * 2 + [False] * 14).rows.tolist() == [4, 5]
    with pytest.raises(BadData, match=r"a mask of shape \(3,\) cannot choose from 16 images"):
        images.subset(torch.tensor([True, False, True]))


def test_shape_and_classes_describe_the_store() -> None:
    images = toy(channels=1)
    assert images.shape == (1, 6, 5)
    assert (images.classes, images.names) == (4, ("0", "1", "2", "3"))


def test_normalised_training_pixels_have_mean_zero_and_deviation_one() -> None:
    images = toy()
    normal = images.normalise(images.pixels)
    assert normal.dtype == torch.float32
    assert normal.mean((0, 2, 3)).tolist() == pytest.approx([0, 0, 0], abs=1e-5)
    assert normal.std((0, 2, 3), correction=0).tolist() == pytest.approx([1, 1, 1], abs=1e-5)
    assert images.pixels.dtype == torch.uint8


@pytest.mark.parametrize("number", [1, 20, 5000])
def test_statistics_equal_numpy_in_double_precision(number: int) -> None:
    pixels = torch.randint(0, 256, (number, 3, 4, 4), dtype=torch.uint8, generator=seeded(number))
    mean, std = channel_statistics(pixels)
    exact = pixels.numpy().astype(np.float64) / 255
    assert mean == pytest.approx(exact.mean((0, 2, 3)), abs=1e-12)
    assert std == pytest.approx(exact.std((0, 2, 3)), abs=1e-9)


def test_a_constant_channel_is_only_centred() -> None:
    pixels = torch.full((3, 1, 4, 4), 7, dtype=torch.uint8)
    images = images_from_tensors(pixels, torch.tensor([0, 1, 0]))
    assert images.std[0] > 0
    assert images.normalise(pixels).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("pixels", "labels", "message"),
    [
        (torch.zeros(2, 1, 4, 4), torch.zeros(2).long(), "must be uint8 .* not torch.float32"),
        (torch.zeros(2, 4, 4).byte(), torch.zeros(2).long(), r"must be uint8 .* shape \(2, 4, 4\)"),
        (torch.zeros(2, 1, 4, 4).byte(), torch.zeros(3).long(), r"2 images but labels of shape \(3,\)"),
        (torch.zeros(0, 1, 4, 4).byte(), torch.zeros(0).long(), "there are no images"),
        (torch.zeros(2, 1, 4, 4).byte(), torch.zeros(2), "labels must be whole numbers, not torch.float32"),
        (torch.zeros(2, 1, 4, 4).byte(), torch.tensor([0, 2]), "row 1 has label 2; 2 classes are known"),
        (torch.zeros(2, 1, 4, 4).byte(), torch.tensor([-1, 0]), "row 0 has label -1"),
    ],
)
def test_tensors_that_are_not_images_are_refused(pixels: Tensor, labels: Tensor, message: str) -> None:
    with pytest.raises(BadData, match=f"my data: .*{message}"):
        images_from_tensors(pixels, labels, ["a", "b"], where="my data")


@settings(deadline=None, max_examples=80)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    share=st.floats(0, 0.99),
    seed=st.integers(0, 2**31),
)
def test_a_stratified_split_keeps_every_position_once_and_every_class_twice(
    labels: list[int], share: float, seed: int
) -> None:
    numbers = torch.tensor(labels)
    kept, aside = split_stratified(numbers, share, seed)
    assert sorted(torch.cat([kept, aside]).tolist()) == list(range(len(labels)))
    assert kept.tolist() == sorted(kept.tolist())
    assert aside.tolist() == sorted(aside.tolist())
    for label in set(labels):
        count, taken = labels.count(label), int((numbers[aside] == label).sum())
        wanted = 0 if share == 0 else min(max(round(share * count), 1), count - 1)
        assert taken == wanted
        assert taken < count
    again = split_stratified(numbers, share, seed)
    assert torch.equal(again[1], aside)


def test_another_seed_sets_other_images_aside() -> None:
    labels = torch.arange(1000) % 10
    assert not torch.equal(split_stratified(labels, 0.1, 0)[1], split_stratified(labels, 0.1, 1)[1])


@pytest.mark.parametrize("share", [-0.1, 1, 1.5, float("nan")])
def test_a_share_outside_its_range_is_refused(share: float) -> None:
    with pytest.raises(BadSetting, match="at least 0 and below 1"):
        split_stratified(torch.zeros(4).long(), share, 0)


def test_evaluation_batches_are_normalised_and_in_order() -> None:
    images = toy().subset(list(range(19, -1, -1)))
    batches = list(evaluation_batches(images, batch_size=8))
    assert [len(labels) for _, labels in batches] == [8, 8, 4]
    assert torch.equal(torch.cat([labels for _, labels in batches]), images.labels)
    assert torch.equal(torch.cat([pixels for pixels, _ in batches]), images.normalise(images.pixels.flip(0)))


def test_a_data_loader_passes_through_and_can_be_read_twice() -> None:
    batch, labels = floats(10), torch.arange(10)
    loader = DataLoader(TensorDataset(batch, labels), batch_size=4)
    for _ in range(2):
        seen = list(evaluation_batches(loader))
        assert torch.equal(torch.cat([images for images, _ in seen]), batch)
        assert torch.equal(torch.cat([numbers for _, numbers in seen]), labels)


def test_a_generator_is_refused_because_it_can_be_read_only_once() -> None:
    once = ((images, labels) for images, labels in [(floats(2), torch.zeros(2).long())])
    with pytest.raises(BadData, match="generator can be read only once; pass Images or a DataLoader"):
        next(evaluation_batches(once))


def test_a_loader_is_asked_for_one_pass_only() -> None:
    class Counted(list[tuple[Tensor, Tensor]]):
        passes = 0

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            self.passes += 1
            return super().__iter__()

    batches = Counted([(floats(2), torch.tensor([0, 1], dtype=torch.int32))])
    ((_, labels),) = evaluation_batches(batches)
    assert batches.passes == 1
    assert labels.dtype == torch.int64


def test_labels_of_another_kind_are_refused() -> None:
    with pytest.raises(BadData, match=r"labels must be whole numbers, not torch\.float32"):
        next(evaluation_batches([(floats(2), torch.zeros(2))]))


def test_validation_images_of_their_own_have_no_row_of_a_training_image() -> None:
    pixels, labels = torch.arange(8 * 4).to(torch.uint8).view(8, 1, 2, 2), torch.arange(8) % 2
    train = images_from_tensors(pixels, labels, scale="0-1")
    data = make_dataset(train, valid=images_from_tensors(pixels[:3] + 100, labels[:3]))
    assert not torch.isin(data.valid.rows, data.train.rows).any()
    ((batch, own),) = evaluation_batches(data.valid)
    assert torch.equal(batch, (pixels[:3] + 100) / 255), "preprocessed as the training images"
    assert own.tolist() == labels[:3].tolist()
    assert make_dataset(train, valid=train.subset([0, 1])).valid.rows.tolist() == [0, 1], "of one store: as they are"


def test_arrays_and_lists_are_as_good_as_tensors_and_words_are_refused() -> None:
    pixels = torch.arange(2 * 4 * 4).view(2, 1, 4, 4).to(torch.uint8)
    of_arrays = images_from_tensors(pixels.numpy(), [1, 0])
    assert torch.equal(of_arrays.pixels, pixels)
    assert of_arrays.labels.tolist() == [1, 0]
    assert images_from_tensors(pixels, np.array([1, 0], np.uint16)).labels.tolist() == [1, 0]
    for labels in (["1", "0"], [None, 1], [[0], [1, 2]], [1j, 0], None):
        with pytest.raises(BadData, match="labels must be a tensor, an array or a list of numbers"):
            images_from_tensors(pixels, labels)
    for labels in (3, torch.tensor([1j, 0])):
        with pytest.raises(BadData, match="labels"):
            images_from_tensors(pixels, labels)
    with pytest.raises(BadData, match=r"a DataLoader of .* may give floats"):
        images_from_tensors(pixels.float(), [1, 0])
