"""Augmentation against slow loops."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedortho.training.augmentation import Augment


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def floats(number: int, height: int = 8, width: int = 8, channels: int = 3) -> Tensor:
    return torch.rand(number, channels, height, width, generator=seeded()) + 1  # never 0, the colour of padding


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
