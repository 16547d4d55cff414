"""Shadow models: models trained on random halves of a sample, cached on disk, for membership attacks."""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedortho.data.images import Dataset, Images
from fedortho.data.request import ForgetRequest
from fedortho.engines.query import draw
from fedortho.errors import BadCheckpoint, BadSetting
from fedortho.storage.checkpoints import load_weights
from fedortho.storage.files import read_tensors, tensors_digest, write_tensors
from fedortho.training.loop import fit
from fedortho.training.recipe import Recipe

MIN_MODELS, MAX_MODELS = 8, 64
MIN_TARGETS = 100  # forget images in the proxy, where the forget set has that many


@dataclass(frozen=True)
class ShadowSettings:
    """Number of shadow models, their data and their training."""

    models: int = 16
    images: int = 10_000  # of the proxy, 0: all; each shadow model is trained on a half
    targets: int = 500  # forget images that are added to a proxy which by chance has too few
    recipe: Recipe = field(default_factory=lambda: Recipe(epochs=6))
    seed: int = 0

    def __post_init__(self) -> None:
        if not MIN_MODELS <= self.models <= MAX_MODELS:
            raise BadSetting(f"shadow models must be {MIN_MODELS} to {MAX_MODELS}, not {self.models}")
        if 0 < self.images < 8 or self.images < 0 or self.targets < 1 or not 0 <= self.seed < 2**32:
            given = f"{self.images}, {self.targets} and {self.seed}"
            raise BadSetting(f"a proxy needs at least 8 images, 1 target and a seed of 0 or more, not {given}")

    @property
    def choosing(self) -> int:
        """How many of the models, whole pairs, choose the most memorised images; the others are measured on them.

        >>> [ShadowSettings(models).choosing for models in (8, 16, 32)]
        [2, 4, 10]
        """
        return max(self.models // 6, 1) * 2


@dataclass(frozen=True)
class ShadowPlan:
    """What the membership audit needs: how shadow models unlearn, where they are kept, how they are trained."""

    forget: Callable[[nn.Module, Dataset, ForgetRequest, Path | None], nn.Module]  # the audited method
    directory: Path  # shared by methods and requests
    settings: ShadowSettings = field(default_factory=ShadowSettings)
    method: str = ""  # name and hyper-parameters: what was measured by them is kept; empty: it is not
    replays: bool = False  # whether `forget` needs the directory of the shadow model's epochs, its last argument


def choose_proxy(pool: Images, forget: Tensor, settings: ShadowSettings) -> tuple[Images, Tensor]:
    """The proxy, a sample of the pool, and a mask of its images in the forget set.

    It does not depend on the request unless the plain draw has too few images of the forget set; then some are added.
    """
    number = settings.images or len(pool)
    proxy = draw(pool, number, settings.seed)
    rows = pool.rows[forget]
    is_forget = torch.isin(proxy.rows, rows)
    if int(is_forget.sum()) >= min(int(forget.sum()), MIN_TARGETS):
        return proxy, is_forget
    targets = draw(pool.subset(forget), min(settings.targets, number // 2), settings.seed)
    rest = draw(pool.subset(~forget), number - len(targets), settings.seed)
    proxy = replace(pool, rows=torch.cat([targets.rows, rest.rows]).sort().values)
    return proxy, torch.isin(proxy.rows, rows)


def half(number: int, images: int, seed: int) -> Tensor:
    """The images of one shadow model as a mask; the second model of a pair gets the other half.

    >>> (half(0, 5, seed=1) ^ half(1, 5, seed=1)).all().item()
    True
    """
    random = torch.Generator().manual_seed(seed * 1000 + number // 2)
    mask = torch.zeros(images, dtype=torch.bool)
    mask[torch.randperm(images, generator=random)[: images // 2]] = True
    return mask if number % 2 == 0 else ~mask


class Shadows:
    """The shadow models of a proxy, each trained at the first use and read from disk afterwards.

    The name of their directory is a digest of data, recipe and network, so methods and requests share equal models.
    """

    def __init__(
        self,
        directory: Path,
        proxy: Images,
        build: Callable[[int], nn.Module],
        settings: ShadowSettings,
        *,
        device: torch.device | str = "cpu",
    ) -> None:
        self.proxy, self.build, self.settings, self.device = proxy, build, settings, device
        self.members = torch.stack([half(number, len(proxy), settings.seed) for number in range(settings.models)])
        self.key = self._key()
        self.directory = directory / f"shadows-{self.key[:16]}"

    def _key(self) -> str:
        proxy, settings = self.proxy, self.settings
        content = {"rows": proxy.rows, "labels": proxy.labels, "pixels": proxy.pixels[proxy.rows]}
        parts = {
            "recipe": asdict(settings.recipe),
            "seed": settings.seed,
            "proxy": tensors_digest(content),
            "scale": [proxy.mean, proxy.std, *([proxy.input_digest] if proxy.transform else [])],
            "network": tensors_digest(self.build(0).state_dict()),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def name_of(self, mask: Tensor) -> str:
        """A name for some images of the proxy."""
        return tensors_digest({"rows": self.proxy.rows[mask]})[:12]

    def original(self, number: int) -> nn.Module:
        """The shadow model trained on its half."""
        return self._model(f"original-{number:02}", self.members[number], number)

    def epochs(self, number: int) -> Path:
        """A directory with the shadow model after each epoch of its training, which is repeated for it."""
        place, seed = self.directory / f"epochs-{number:02}", self.settings.seed * 1000 + number
        recipe, images = replace(self.settings.recipe, seed=seed), self.proxy.subset(self.members[number])

        def keep(epoch: int, weights: Mapping[str, Tensor]) -> None:
            write_tensors(place / f"{epoch:05}.safetensors", weights, {"key": self.key})

        if not (place / f"{recipe.epochs:05}.safetensors").is_file():
            fit(self.build(seed), images, recipe, device=self.device, keep=keep)
        return place

    def without(self, number: int, forget: Tensor) -> nn.Module:
        """A shadow model trained, with another seed, on the same half without the images of a mask over the proxy."""
        name = f"without-{self.name_of(forget)}-{number:02}"
        return self._model(name, self.members[number] & ~forget, MAX_MODELS + number)

    def _model(self, name: str, mask: Tensor, offset: int) -> nn.Module:
        seed = self.settings.seed * 1000 + offset
        model, recipe = self.build(seed), replace(self.settings.recipe, seed=seed)
        images = self.proxy.subset(mask)
        weights = self.kept(name, lambda: fit(model, images, recipe, device=self.device).state_dict())
        load_weights(model, weights, self.directory / name)
        return model.eval()

    def kept(self, name: str, compute: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Tensors that are computed at the first use; a process that is killed leaves whole files only."""
        path = self.directory / f"{name}.safetensors"
        if not path.is_file():
            write_tensors(path, compute(), {"key": self.key})
        tensors, note = read_tensors(path)
        if note.get("key") != self.key:
            raise BadCheckpoint(f"{path} was made from other images or settings; delete it")
        return tensors
