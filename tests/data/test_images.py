"""Images, their statistics and splits, and augmentation against slow loops."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from fedortho.data.images import (
    Augment,
    Images,
    channel_statistics,
    evaluation_batches,
    images_from_tensors,
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


def windows(padded: Tensor, height: int, width: int) -> Iterator[Tensor]:
    """Every window of one padded image, by the obvious loops."""
    for top in range(padded.shape[1] - height + 1):
        for left in range(padded.shape[2] - width + 1):
            yield padded[:, top : top + height, left : left + width]


def test_a_crop_is_a_window_of_the_padded_image_and_all_windows_occur() -> None:
    batch = floats(1, 5, 4).expand(400, -1, -1, -1)
    cropped = Augment(crop=2, flip=0)(batch, seeded())
    possible = list(windows(torch.nn.functional.pad(batch[0], (2, 2, 2, 2)), 5, 4))
    chosen = {next(n for n, window in enumerate(possible) if torch.equal(window, image)) for image in cropped}
    assert chosen == set(range(25))


def test_each_image_of_a_batch_is_augmented_on_its_own() -> None:
    batch = floats(1).expand(64, -1, -1, -1)
    for augment in (Augment(crop=4, flip=0), Augment(crop=0, flip=0.5), Augment(crop=0, flip=0, erase=1)):
        assert len(torch.unique(augment(batch, seeded()), dim=0)) > 1


def test_augmentation_does_not_mix_images() -> None:
    batch = torch.arange(1, 9).float().view(8, 1, 1, 1).expand(-1, 3, 8, 8)
    changed = Augment(erase=0.5)(batch, seeded())
    for value, image in enumerate(changed, 1):
        assert set(image.unique().tolist()) <= {0.0, float(value)}


def test_the_generator_decides_everything_and_the_input_stays() -> None:
    batch, augment = floats(16), Augment(crop=4, flip=0.5, erase=0.5)
    before = batch.clone()
    assert torch.equal(augment(batch, seeded(1)), augment(batch, seeded(1)))
    assert not torch.equal(augment(batch, seeded(1)), augment(batch, seeded(2)))
    assert torch.equal(batch, before)


@pytest.mark.parametrize(("flip", "low", "high"), [(0.0, 0, 0), (0.5, 420, 580), (1.0, 1000, 1000)])
def test_flips_mirror_left_and_right_as_often_as_asked(flip: float, low: int, high: int) -> None:
    batch = floats(1).expand(1000, -1, -1, -1)
    changed = Augment(crop=0, flip=flip)(batch, seeded())
    mirrored = [torch.equal(image, batch[0].flip(2)) for image in changed]
    assert low <= sum(mirrored) <= high
    assert all(
        torch.equal(image, batch[0]) for image, is_mirrored in zip(changed, mirrored, strict=True) if not is_mirrored
    )


def test_erasing_blanks_one_rectangle_of_bounded_area_as_often_as_asked() -> None:
    batch = floats(1000, 32, 32)
    changed = Augment(crop=0, flip=0, erase=0.4)(batch, seeded())
    holes = (changed == 0).all(1)  # (n, height, width)
    assert torch.equal((changed == 0).any(1), holes)
    assert torch.equal(changed[~holes.unsqueeze(1).expand_as(changed)], batch[~holes.unsqueeze(1).expand_as(batch)])
    erased = holes.flatten(1).any(1)
    assert 340 <= int(erased.sum()) <= 460
    for hole in holes[erased]:
        high, wide = int(hole.any(1).sum()), int(hole.any(0).sum())
        assert int(hole.sum()) == high * wide
        assert 0.01 < high * wide / 1024 < 0.36  # 2 to 33 %, rounded to whole pixels
    reached = holes.any(0)
    assert reached[1:-1, 1:-1].all()
    assert all(edge.any() for edge in (reached[0], reached[-1], reached[:, 0], reached[:, -1]))


def test_no_augmentation_is_the_identity() -> None:
    batch = floats(4)
    assert torch.equal(Augment(crop=0, flip=0, erase=0)(batch, seeded()), batch)


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


def test_what_gives_no_batches_is_refused() -> None:
    with pytest.raises(BadData, match="a TensorDataset gives no batches"):
        next(evaluation_batches(TensorDataset(floats(2), torch.arange(2))))
