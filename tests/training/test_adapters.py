"""Adapters: they begin as nothing, only they move, and they come off without a trace."""

import pytest
import torch
from small import TinyNet

from fedortho.data.images import Images
from fedortho.errors import BadSetting, UnknownName
from fedortho.storage.files import tensors_digest
from fedortho.training.adapters import Adapters, attach, is_adapter, merge, take_off
from fedortho.training.loop import fit
from fedortho.training.objectives import FitOptions
from fedortho.training.recipe import Recipe

LAYERS = ("features.3", "fc")


@pytest.mark.parametrize("kind", ["sparse", "low-rank"])
def test_training_moves_adapters_only_and_taking_them_off_gives_the_model_back(
    toy: Images, tiny: TinyNet, kind: str
) -> None:
    adapters = Adapters(LAYERS, kind, density=0.3, rank=3)
    adapted = attach(tiny, adapters).eval()
    inputs = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(adapted(inputs), tiny.eval()(inputs)), "adapters are nothing at first"
    recipe = Recipe(epochs=1, batch_size=16, lr=0.1, ortho=0.0)
    trained = fit(adapted, toy, recipe, options=FitOptions(norms="frozen"))
    state, before = trained.state_dict(), adapted.state_dict()
    moved = {name for name in state if not torch.equal(state[name], before[name])}
    assert moved
    assert all(map(is_adapter, moved))
    assert tensors_digest(take_off(tiny, trained).state_dict()) == tensors_digest(tiny.state_dict())
    plain = merge(tiny, trained, adapters)
    with torch.no_grad():
        assert torch.allclose(plain(inputs), trained(inputs), atol=1e-6)
    assert plain.state_dict().keys() == tiny.state_dict().keys()


def test_a_sparse_adapter_has_the_coordinates_of_its_seed(tiny: TinyNet) -> None:
    def places(seed: int) -> torch.Tensor:
        adapted = attach(tiny, Adapters(("fc",), density=0.25, seed=seed))
        return dict(adapted.named_buffers())["fc.parametrizations.weight.0.places"]

    assert len(places(0)) == 12
    assert torch.equal(places(0), places(0))
    assert not torch.equal(places(0), places(1))
    assert "fc.parametrizations.weight.0.places" not in attach(tiny, Adapters(("fc",))).state_dict(), "it never travels"


def test_what_no_adapter_can_be_is_refused() -> None:
    with pytest.raises(UnknownName, match=r"no kind 'lora'; .*choose from low-rank, sparse"):
        Adapters(("fc",), "lora")
    with pytest.raises(BadSetting, match="density must be above 0 and at most 1"):
        Adapters(("fc",), density=0.0)
