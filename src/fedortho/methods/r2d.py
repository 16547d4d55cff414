"""R2D, rewind to delete: go back some epochs, and train them again on the retain set (Mu and Klabjan, 2409.09778)."""

import copy
import logging
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar

from torch import nn

from fedortho.data.request import KINDS, ForgetRequest
from fedortho.engines.engine import Engine
from fedortho.methods.method import CannotServe, forget_and_retain
from fedortho.storage.checkpoints import load_weights
from fedortho.storage.files import read_tensors
from fedortho.storage.settings import Count
from fedortho.training.recipe import Recipe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class R2D(Recipe):
    """Go back `back` epochs, or rounds of a federation, and replay the rest of the schedule on the retain set.

    It needs a run that kept epochs or rounds (`kept`), and takes the last one that is at least so far back. That model
    has met the forget set, as have all before it since the data's first use: the result is approximate, and the fewer
    epochs are replayed, the more of the data stays. Momentum begins at 0. `compare` and `forget` pass the recipe of the
    run; `back` is chosen by the user, or by the membership attack on other samples (`forget --shadows N`).
    """

    name: ClassVar[str] = "r2d"
    kinds: ClassVar[tuple[str, ...]] = KINDS
    needs: ClassVar[str] = "retain: the epochs that are replayed; a kept model, which has met the forget set"
    norms: ClassVar[str] = "those of the kept model, updated by training"
    back: Annotated[Count, "epochs or rounds to go back; 0: half of them"] = 0
    kept: Annotated[str, "directory of the kept epochs or rounds"] = ""

    def __call__(self, model: nn.Module, engine: Engine, request: ForgetRequest) -> nn.Module:
        _, retain = forget_and_retain(self, engine, request)
        number, path = self.begin()
        weights, _ = read_tensors(path)
        before = copy.deepcopy(model).cpu()
        load_weights(before, weights, path)
        unit = path.parent.name.removesuffix("s")
        logger.info(
            "r2d goes back to the end of %s %d of %d, which has met the data as those before it may have: approximate",
            *(unit, number, self.epochs),
        )
        recipe = Recipe(**{field.name: getattr(self, field.name) for field in fields(Recipe)})
        return engine.fit(before, retain, recipe, after=number)

    def begin(self) -> tuple[int, Path]:
        """The kept epoch to go back to, and its file; refused by name where there is none."""
        latest = self.epochs - (self.back or -(-self.epochs // 2))
        kept = {int(file.stem): file for file in Path(self.kept).glob("*.safetensors")} if self.kept else {}
        number = max((each for each in kept if each <= latest), default=0)
        if not number:
            found = f"{self.kept or 'no directory'} has {', '.join(map(str, sorted(kept))) or 'none'}"
            advice = "train with --keep-epochs or federate with --keep-rounds"
            if kept:
                advice = (
                    'choose a smaller back (forget: --set back=N; compare: --settings FILE.json, {"r2d": {"back": N}})'
                )
            raise CannotServe(
                f"r2d goes back to a kept epoch or round up to {latest}, and {found}; {advice}, or retrain"
            )
        return number, kept[number]
