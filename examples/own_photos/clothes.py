"""Somebody's network and training script, in plain PyTorch: python clothes.py photos/train clothes.pt"""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn


class Clothes(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        widths, layers = [1, 32, 48, 64, 96], []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.hidden = nn.Linear(96, 64)
        self.output = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = x.view(len(x), -1)
        return self.output(torch.relu(self.hidden(x)))


def main() -> None:
    folder, checkpoint = Path(sys.argv[1]), Path(sys.argv[2])
    without = sys.argv[3] if len(sys.argv) > 3 else None  # a class to leave out
    names = sorted(path.name for path in folder.iterdir())
    kept = [name for name in names if name != without]
    files = [(file, names.index(name)) for name in kept for file in sorted((folder / name).glob("*.png"))]
    images = torch.stack([torch.from_numpy(np.array(Image.open(file))) for file, _ in files]).unsqueeze(1) / 255
    labels = torch.tensor([label for _, label in files])
    torch.manual_seed(0)
    model = Clothes(len(names))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(6):
        for batch in torch.randperm(len(images)).split(32):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
        torch.save({"epoch": epoch + 1, "model_state_dict": model.state_dict()}, checkpoint)


if __name__ == "__main__":
    main()
