from small import TinyNet
from torch import nn

from fedortho.data.images import Images
from fedortho.models.predictions import accuracy


def test_every_module_keeps_its_mode_a_frozen_batch_norm_too(toy: Images, tiny: TinyNet) -> None:
    norm = next(module for module in tiny.modules() if isinstance(module, nn.BatchNorm2d))
    tiny.train()
    norm.eval()  # as for training with frozen statistics
    accuracy(tiny, toy)
    assert tiny.training
    assert not norm.training
