"""ResNet-20 for CIFAR-10 as in akamaster/pytorch_resnet_cifar10: shortcuts across widths have no parameters."""

from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Two convolutions; where the width changes, the shortcut takes every second pixel and pads channels with zeros."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == width else 2
        self.conv1 = nn.Conv2d(inputs, width, 3, self.stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.padding = (width - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        main = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.padding:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))
        return functional.relu(main + x)


class ResNet(nn.Module):
    """A stem of 16 kernels, three stages of three blocks with 16, 32 and 64 kernels, one linear layer."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = nn.Sequential(Block(16, 16), Block(16, 16), Block(16, 16))
        self.layer2 = nn.Sequential(Block(16, 32), Block(32, 32), Block(32, 32))
        self.layer3 = nn.Sequential(Block(32, 64), Block(64, 64), Block(64, 64))
        self.linear = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(functional.avg_pool2d(x, x.shape[3]).flatten(1))  # type: ignore[no-any-return]


def resnet20(num_classes: int = 10) -> ResNet:
    return ResNet(num_classes)
