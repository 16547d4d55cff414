"""A network and images of your own: python examples/own_model.py.  Any classifier with convolutions will do."""

import torch
from torch import Tensor, nn

import fedortho as fo


class Net(nn.Module):
    """A plain PyTorch module: no base class, no wrapper."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 96, 3, padding=1, bias=False), nn.BatchNorm2d(96), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(96, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def stripes(number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Four classes of noisy stripes, (n, 1, 12, 12) in uint8: horizontal, vertical and the two diagonals."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(number) % 4
    row, column = torch.meshgrid(torch.arange(12), torch.arange(12), indexing="ij")
    steps = torch.stack([row, column, row + column, row - column])[labels]  # (n, 12, 12)
    phase = torch.randint(0, 4, (number, 1, 1), generator=random)
    waves = ((steps + phase) % 4 < 2).float() * 120 + torch.rand(number, 12, 12, generator=random) * 120
    return waves.to(torch.uint8).unsqueeze(1), labels


def main() -> None:
    names = ["horizontal", "vertical", "rising", "falling"]
    train = fo.images_from_tensors(*stripes(1200, seed=0), names)
    test = fo.images_from_tensors(*stripes(400, seed=1), names)
    data = fo.make_dataset(train, test, valid=0.2)  # a fifth becomes the validation set

    torch.manual_seed(0)
    model = fo.fit(Net(classes=4), data.train, fo.Recipe(epochs=4, batch_size=32, crop=0, flip=0.0))
    checked = fo.check(model, data)  # every step, tried on a few images
    print(f"hide: {checked.methods['hide'] or 'works'}; edited: {', '.join(checked.edited)}")
    forgot = fo.forget(model, data, "class:rising", level="hide").model
    for name, one in (("before", model), ("after", forgot)):
        found = fo.accuracies_of(one, data, "class:rising")
        print(f"{name:7} forget {found.forget:.1%}  retain {found.retain:.1%}")
    print(f"{type(model).__name__} in, {type(forgot).__name__} out")


if __name__ == "__main__":
    main()
