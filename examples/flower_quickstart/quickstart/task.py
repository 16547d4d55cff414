"""The model, its data, and how one client trains: nothing here knows of forgetting."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Net(nn.Module):
    """The model of Flower's quickstart, for images of 8x8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def load_datasets(partition_id: int, num_partitions: int) -> tuple[Dataset, Dataset]:
    """The training and the test images of one node; here a part of digits, in a deployment files of its own."""
    digits = load_digits()
    pixels = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
    labels = torch.from_numpy(digits.target).long()
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(42))[partition_id::num_partitions]
    train, test = rows[: len(rows) * 4 // 5], rows[len(rows) * 4 // 5 :]
    return TensorDataset(pixels[train], labels[train]), TensorDataset(pixels[test], labels[test])


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float) -> float:
    """Train the model; returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    total = 0.0
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


def test(net: nn.Module, loader: DataLoader) -> tuple[float, float]:
    """The mean loss and the accuracy."""
    net.eval()
    with torch.no_grad():
        found = [(net(images), labels) for images, labels in loader]
    logits, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    return F.cross_entropy(logits, labels).item(), (logits.argmax(1) == labels).float().mean().item()
