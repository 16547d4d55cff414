from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small import TinyNet
from stopping import Killed, counted, killed_at, operations
from torch import nn

from fedortho.data.images import Images, images_from_tensors
from fedortho.errors import BadCheckpoint, BadSetting
from fedortho.evaluation.shadows import Shadows, ShadowSettings, choose_proxy, half
from fedortho.storage.files import write_tensors
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

QUICK = Recipe(epochs=1, batch_size=32, ortho=0.0, crop=0, flip=0.0)
SETTINGS = ShadowSettings(models=8, images=100, recipe=QUICK)


def build(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return TinyNet()


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(a.equal(b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_every_image_is_met_by_half_of_the_shadows() -> None:
    met = torch.stack([half(number, 101, seed=3) for number in range(16)])
    assert (met.sum(0) == 8).all()
    assert set(met.sum(1).tolist()) == {50, 51}
    assert not met[0].equal(met[2])


def test_shadows_are_found_again_by_what_they_were_made_from(toy: Images, tmp_path: Path) -> None:
    first = Shadows(tmp_path, toy, build, SETTINGS)
    gone = toy.labels == 1
    models = [first.original(3), first.without(3, gone)]
    assert not same(*models)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    assert len(files) == 2
    again = Shadows(tmp_path, toy, build, replace(SETTINGS, models=12))
    assert same(again.original(3), models[0])
    assert same(again.without(3, gone), models[1])
    assert not again.original(3).training
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")} == files
    again.without(3, toy.labels == 2)
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3


def test_other_images_settings_or_networks_make_other_shadows(toy: Images, tmp_path: Path) -> None:
    changed = replace(toy, pixels=toy.pixels.clone())
    changed.pixels[5, 0, 0, 0] ^= 1
    keys = {
        Shadows(tmp_path, images, make, settings).key
        for images, make, settings in (
            (toy, build, SETTINGS),
            (changed, build, SETTINGS),
            (toy.subset(range(200)), build, SETTINGS),
            (toy, lambda seed: build(seed + 1), SETTINGS),
            (toy, build, replace(SETTINGS, seed=1)),
            (toy, build, replace(SETTINGS, recipe=replace(QUICK, epochs=2))),
        )
    }
    assert len(keys) == 6


def test_a_file_of_other_shadows_is_refused(toy: Images, tmp_path: Path) -> None:
    shadows = Shadows(tmp_path, toy, build, SETTINGS)
    write_tensors(shadows.directory / "original-00.safetensors", build(0).state_dict(), {"key": "other"})
    with pytest.raises(BadCheckpoint, match="delete it"):
        shadows.original(0)


def test_all_classes_share_one_proxy_and_single_samples_are_put_into_theirs() -> None:
    pool = images_from_tensors(torch.zeros(2000, 1, 8, 8, dtype=torch.uint8), torch.arange(2000) % 4)
    settings = replace(SETTINGS, images=1000)
    proxies = [choose_proxy(pool, pool.labels == label, settings) for label in (1, 2)]
    for label, (proxy, gone) in zip((1, 2), proxies, strict=True):
        assert len(proxy) == 1000
        assert gone.equal(proxy.labels == label)
    assert proxies[0][0].rows.equal(proxies[1][0].rows)
    asked = torch.zeros(2000, dtype=torch.bool)
    asked[[7, 70, 1700]] = True
    proxy, chosen = choose_proxy(pool, asked, replace(SETTINGS, images=20))
    assert proxy.rows[chosen].tolist() == [7, 70, 1700]
    assert len(set(proxy.rows.tolist())) == len(proxy) == 20


@pytest.mark.slow
def test_a_killed_process_keeps_the_models_that_it_finished(
    toy: Images, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at every file operation; the next process trains what is missing, to the same bytes."""
    trained: list[nn.Module] = []
    monkeypatch.setattr("fedortho.evaluation.shadows.fit", lambda *a, **b: trained.append(fit(*a, **b)) or trained[-1])

    def three(directory: Path) -> list[bytes]:
        shadows = Shadows(directory, toy, build, SETTINGS)
        for number in range(3):
            shadows.original(number)
        return [path.read_bytes() for path in sorted(shadows.directory.glob("*.safetensors"))]

    whole = three(tmp_path / "whole")
    places = operations(lambda: three(tmp_path / "counted"))
    assert places >= 9
    for place in range(1, places + 1):
        directory = tmp_path / str(place)
        with suppress(Killed), counted(killed_at(place)):
            three(directory)
        finished = len(list(directory.rglob("*.safetensors")))
        trained.clear()
        assert three(directory) == whole
        assert len(trained) == 3 - finished
    assert finished >= 2, "the last operation belongs to the third model"


def test_numbers_out_of_bounds_are_refused() -> None:
    for models in (7, 65):
        with pytest.raises(BadSetting, match="8 to 64"):
            ShadowSettings(models=models)
    with pytest.raises(BadSetting, match="at least 8"):
        ShadowSettings(images=7)
