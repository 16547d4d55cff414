"""Train ResNet-20 on CIFAR-10 without a class, in plain PyTorch: somebody's script that never heard of fedortho.

python benchmarks/plain_training.py --data ../shared/data/cifar10 --without 6 --epochs 4 --out without-6.pt

The checkpoint is saved as people save them: {"epoch": …, "state_dict": …}. Ten outputs, as in the published network.
"""

import argparse
import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from resnet20 import resnet20
from torch import Tensor, nn

MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def read(files: list[Path]) -> tuple[Tensor, Tensor]:
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    blobs = [next(value for value in row.values() if isinstance(value, dict))["bytes"] for row in rows]
    labels = [next(value for value in row.values() if isinstance(value, int)) for row in rows]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(blob)).convert("RGB")) for blob in blobs])
    return (torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255 - MEAN) / STD, torch.tensor(labels)


def augment(images: Tensor) -> Tensor:
    flipped = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
    padded = nn.functional.pad(flipped, (4, 4, 4, 4))
    y, x = torch.randint(0, 9, (2, len(images)))
    rows, columns = (y[:, None] + torch.arange(32))[:, :, None], (x[:, None] + torch.arange(32))[:, None, :]
    return padded.permute(0, 2, 3, 1)[torch.arange(len(images))[:, None, None], rows, columns].permute(0, 3, 1, 2)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--without", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    torch.manual_seed(options.seed)
    images, labels = read(sorted(options.data.rglob("*train*.parquet")))
    keep = labels != options.without
    images, labels = images[keep], labels[keep]
    model = resnet20(10)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # the stub lacks this form
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    steps = -(-len(images) // 128)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, epochs=options.epochs, steps_per_epoch=steps)
    for epoch in range(options.epochs):
        total = 0.0
        for batch in torch.randperm(len(images)).split(128):
            loss = nn.functional.cross_entropy(model(augment(images[batch])), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch + 1} of {options.epochs}: loss {total / len(images):.3f}", flush=True)
        torch.save({"epoch": epoch + 1, "state_dict": model.state_dict()}, options.out)


if __name__ == "__main__":
    main()
