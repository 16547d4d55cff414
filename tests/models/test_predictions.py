import pytest
from small import TinyNet
from torch import nn

from fedortho.data.images import Images
from fedortho.errors import BadSetting
from fedortho.models.predictions import accuracy, evaluate


def test_every_module_keeps_its_mode_a_frozen_batch_norm_too(toy: Images, tiny: TinyNet) -> None:
    norm = next(module for module in tiny.modules() if isinstance(module, nn.BatchNorm2d))
    tiny.train()
    norm.eval()  # as for training with frozen statistics
    accuracy(tiny, toy)
    assert tiny.training
    assert not norm.training


def test_what_is_no_network_and_what_reads_other_images_is_refused_in_one_line(toy: Images, tiny: TinyNet) -> None:
    with pytest.raises(BadSetting, match=r"must be a torch\.nn\.Module, not OrderedDict"):
        evaluate(tiny.state_dict(), toy)  # type: ignore[arg-type]
    with pytest.raises(BadSetting, match="the model cannot read images of 1x8x8"):
        evaluate(TinyNet(channels=3), toy)
