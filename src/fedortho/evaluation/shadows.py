"""Small models trained on random halves of some images, kept on disk: what attacks compare a model's answers with."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedortho.data.images import Images
from fedortho.errors import BadCheckpoint, BadSetting
from fedortho.statistics.query import draw
from fedortho.storage.checkpoints import load_weights
from fedortho.storage.files import read_tensors, tensors_digest, write_tensors
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

FEWEST, MOST = 8, 64
LEAST_TARGETS = 100  # forgotten images in the proxy, where there are so many
Report = Callable[[int, int, str], None]  # trained or found so far, in all, which


@dataclass(frozen=True)
class ShadowSettings:
    """How many shadow models there are, and from what they are made."""

    models: int = 16
    images: int = 10_000  # of the proxy, the images of which each shadow gets a half
    targets: int = 500  # forgotten images that are put into the proxy when by chance it has too few
    recipe: Recipe = field(default_factory=lambda: Recipe(epochs=6))
    seed: int = 0

    def __post_init__(self) -> None:
        if not FEWEST <= self.models <= MOST:
            raise BadSetting(f"shadow models must be {FEWEST} to {MOST}, not {self.models}")
        if self.images < 8 or self.targets < 1 or not 0 <= self.seed < 2**32:
            raise BadSetting(
                f"a proxy needs at least 8 images, 1 target and a seed of 0 or more, "
                f"not {self.images}, {self.targets} and {self.seed}"
            )


def choose_proxy(pool: Images, gone: Tensor, settings: ShadowSettings) -> tuple[Images, Tensor]:
    """The proxy, and which of its images must be forgotten; it does not depend on the request where that can be.

    Where the plain draw has too few images of the request, some are put in; such a proxy is the request's own.
    """
    proxy = draw(pool, settings.images, settings.seed)
    rows = pool.rows[gone]
    mine = torch.isin(proxy.rows, rows)
    if int(mine.sum()) >= min(int(gone.sum()), LEAST_TARGETS):
        return proxy, mine
    targets = draw(pool.subset(gone), min(settings.targets, settings.images // 2), settings.seed)
    rest = draw(pool.subset(~gone), settings.images - len(targets), settings.seed)
    proxy = replace(pool, rows=torch.cat([targets.rows, rest.rows]).sort().values)
    return proxy, torch.isin(proxy.rows, rows)


def half(number: int, images: int, seed: int) -> Tensor:
    """The images of one shadow as a mask; the second of a pair gets what the first did not.

    >>> (half(0, 5, seed=1) ^ half(1, 5, seed=1)).all().item()
    True
    """
    random = torch.Generator().manual_seed(seed * 1000 + number // 2)
    mask = torch.zeros(images, dtype=torch.bool)
    mask[torch.randperm(images, generator=random)[: images // 2]] = True
    return mask if number % 2 == 0 else ~mask


class Shadows:
    """The shadow models of a proxy, each trained when it is first asked for and found on disk from then on.

    Their directory is named after all that makes them, so methods and requests share them where nothing differs.
    """

    def __init__(
        self,
        directory: Path,
        proxy: Images,
        build: Callable[[int], nn.Module],
        settings: ShadowSettings,
        *,
        device: torch.device | str = "cpu",
        report: Report | None = None,
    ) -> None:
        self.proxy, self.build, self.settings, self.device = proxy, build, settings, device
        self.met = torch.stack([half(number, len(proxy), settings.seed) for number in range(settings.models)])
        self.key = self._key()
        self.directory = directory / f"shadows-{self.key[:16]}"
        self.report = report or (lambda *_: None)
        self._ready = 0

    def _key(self) -> str:
        proxy, settings = self.proxy, self.settings
        content = {"rows": proxy.rows, "labels": proxy.labels, "pixels": proxy.pixels[proxy.rows]}
        parts = {
            "recipe": asdict(settings.recipe),
            "seed": settings.seed,
            "proxy": tensors_digest(content),
            "scale": [proxy.mean, proxy.std],
            "network": tensors_digest(self.build(0).state_dict()),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def original(self, number: int) -> nn.Module:
        """The shadow trained on its half."""
        return self._model(f"original-{number:02}", self.met[number], number)

    def without(self, number: int, gone: Tensor) -> nn.Module:
        """A shadow trained, by another seed, on the same half less the images of a mask over the proxy."""
        name = tensors_digest({"rows": self.proxy.rows[gone]})[:12]
        return self._model(f"without-{name}-{number:02}", self.met[number] & ~gone, MOST + number)

    def images(self, number: int) -> Images:
        return self.proxy.subset(self.met[number])

    def _model(self, name: str, mask: Tensor, place: int) -> nn.Module:
        path, seed = self.directory / f"{name}.safetensors", self.settings.seed * 1000 + place
        model = self.build(seed)
        self._ready += 1
        if path.is_file():
            weights, note = read_tensors(path)
            if note.get("key") != self.key:
                raise BadCheckpoint(f"{path} was made from other images or settings; delete it")
            load_weights(model, weights, path)
            model.eval()
        else:
            model = fit(model, self.proxy.subset(mask), replace(self.settings.recipe, seed=seed), device=self.device)
            write_tensors(path, model.state_dict(), {"key": self.key})
        self.report(self._ready, 2 * self.settings.models, name)
        return model
