"""From a ranking to a patch: which kernels are weakened and by how much; applying, saving and undoing it.

A patch names tensors and what becomes of them. It never holds what it removed: with factors above 0 an
edit can be inverted by anyone who has the patch (the paper's edit), with factor 0 it cannot.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.errors import BadCheckpoint, BadSetting, unknown
from fedortho.files import read_tensors, tensors_digest, write_tensors
from fedortho.rank import Ranking
from fedortho.sites import Site

PATCH_SCHEMA = 1
SCOPES = ("layer", "global")


def kernel_count(ratio: float, kernels: int) -> int:
    """N_p = ⌈ratio · kernels⌉, at least 1 and at most all, safe from rounding: 0.07 · 100 is 7.

    >>> kernel_count(0.07, 100), kernel_count(0.01, 128), kernel_count(1.0, 8)
    (7, 2, 8)
    """
    return min(max(math.ceil(ratio * kernels - 1e-9), 1), kernels)


def strengths(number: int, alpha: float, rank_base: int = 1) -> Tensor:
    """S_i = max(alpha, 1 − i/N_p) for the ranks i = 1 … N_p (paper, section 4.3), float64.

    >>> [round(s, 3) for s in strengths(6, 0.5).tolist()]
    [0.833, 0.667, 0.5, 0.5, 0.5, 0.5]
    """
    ranks = torch.arange(rank_base, rank_base + number, dtype=torch.float64)
    return (1 - ranks / number).clamp_min(alpha)


def choose_kernels(
    ranking: Ranking,
    ratio: float,
    *,
    scope: str = "layer",
    min_difference: float = -math.inf,
    spread: str = "equal",
) -> dict[str, Tensor]:
    """The top kernels: ⌈ratio · kernels⌉ of each site, or as many in all by scores over their spread.

    With scope `layer` the ratio is that of each site (spread `equal`) or rises from the first to the last, with
    the same mean (`rising`). Kernels whose difference is below `min_difference` are spared.
    """
    if not 0 < ratio <= 1:
        raise BadSetting(f"ratio must be above 0 and at most 1, not {ratio}")
    if scope == "layer":
        shares = SPREADS[spread](len(ranking.scores))
        numbers = {
            site: kernel_count(min(ratio * share, 1.0), len(scores))
            for (site, scores), share in zip(ranking.scores.items(), shares, strict=True)
        }
    elif scope == "global":
        numbers = _global_numbers(ranking, ratio)
    else:
        raise unknown("scope", scope, SCOPES)
    chosen = {}
    for site, number in numbers.items():
        kernels = ranking.order(site)[:number]
        kernels = kernels[ranking.scores[site][kernels] >= min_difference]
        if len(kernels):
            chosen[site] = kernels
    return chosen


SPREADS: dict[str, Callable[[int], list[float]]] = {
    "equal": lambda sites: [1.0] * sites,
    "rising": lambda sites: [2 * place / (sites + 1) for place in range(1, sites + 1)],
}


def _global_numbers(ranking: Ranking, ratio: float) -> dict[str, int]:
    """How many of each site are among the best of all, scores being divided by the site's deviation."""
    scaled = {site: scores / scores.std().clamp_min(1e-12) for site, scores in ranking.scores.items()}
    everything = torch.cat(list(scaled.values()))
    owner = torch.cat([torch.full((len(s),), i) for i, s in enumerate(scaled.values())])
    best = torch.argsort(everything, descending=True, stable=True)[: kernel_count(ratio, len(everything))]
    return {site: int((owner[best] == index).sum()) for index, site in enumerate(scaled)}


def merge_chosen(several: Sequence[Mapping[str, tuple[Tensor, Tensor]]]) -> dict[str, tuple[Tensor, Tensor]]:
    """Several selections (site → kernels, strengths) as one: the larger strength counts for a kernel in both."""
    merged: dict[str, dict[int, float]] = {}
    for selection in several:
        for site, (kernels, strong) in selection.items():
            place = merged.setdefault(site, {})
            for kernel, strength in zip(kernels.tolist(), strong.tolist(), strict=True):
                place[kernel] = max(place.get(kernel, 0.0), strength)
    return {
        site: (torch.tensor(list(found)), torch.tensor(list(found.values()), dtype=torch.float64))
        for site, found in merged.items()
    }


@dataclass(frozen=True)
class Patch:
    """What to do to a model: scale some entries, put values into others, replace whole tensors."""

    before: str  # digest of the model that it fits
    after: str  # digest of what must come out
    scaled: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # tensor → channels, factors
    put: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)  # tensor → channels, one value each
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)  # request, settings, kernels per site

    def apply(self, model: nn.Module) -> nn.Module:
        """An edited copy; another model than the one the patch was made for is refused."""
        digest = tensors_digest(model.state_dict())
        if digest == self.after:
            return copy.deepcopy(model)  # applied already: doing it twice must not weaken kernels twice
        if digest != self.before:
            raise BadCheckpoint(f"this patch is for the model {self.before[:12]}, not for {digest[:12]}")
        edited = edit_model(model, self)
        outcome = tensors_digest(edited.state_dict())
        if outcome != self.after:
            raise BadCheckpoint(f"the patch gave {outcome[:12]} instead of {self.after[:12]}: it is damaged")
        return edited

    def __str__(self) -> str:
        """What it does, site by site: kernel × what is left of it."""
        about = f"{self.note.get('request', '')} ({self.note.get('edit')} edit)"
        lines = [f"patch {self.before[:12]} → {self.after[:12]}: {about}"]
        for site, found in self.note.get("sites", {}).items():
            kernels = ", ".join(f"{k} × {f:.3g}" for k, f in zip(found["kernels"], found["factors"], strict=True))
            lines.append(f"  {site}: {kernels}")
        if self.replaced:
            lines.append(f"  replaced: {', '.join(sorted(self.replaced))}")
        return "\n".join(lines)

    def names(self) -> list[str]:
        """All tensors that it changes."""
        return sorted({*self.scaled, *self.put, *self.replaced})

    def trainable(self, model: nn.Module) -> dict[str, Tensor]:
        """Which coordinates later training may move: all but what was silenced; a weakened kernel may recover."""
        parameters = dict(model.named_parameters())
        masks: dict[str, Tensor] = {}
        for entries in (self.scaled, self.put):
            for name, (channels, values) in entries.items():
                if name in parameters and bool((values == 0).any()):
                    mask = masks.setdefault(name, torch.ones_like(parameters[name], dtype=torch.bool))
                    mask[channels[values == 0]] = False
        return masks

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As tensors and a note, for a file or a message."""
        tensors = {f"replaced.{name}": value for name, value in self.replaced.items()}
        for kind, entries in (("scaled", self.scaled), ("put", self.put)):
            for name, (channels, values) in entries.items():
                tensors[f"{kind}.channels.{name}"] = channels.to(torch.int32)
                tensors[f"{kind}.values.{name}"] = values
        note = {"schema": PATCH_SCHEMA, "before": self.before, "after": self.after, "about": dict(self.note)}
        return tensors, note

    def save(self, path: Path) -> None:
        write_tensors(path, *self.packed())


def load_patch(path: Path) -> Patch:
    """Read a saved patch."""
    return unpack_patch(*read_tensors(path), path)


def unpack_patch(tensors: Mapping[str, Tensor], note: Mapping[str, Any], source: Path | str = "the message") -> Patch:
    """The patch that was packed into these."""
    if note.get("schema") != PATCH_SCHEMA:
        raise BadCheckpoint(f"{source} is not a patch of schema {PATCH_SCHEMA}")

    def pairs(kind: str) -> dict[str, tuple[Tensor, Tensor]]:
        start = f"{kind}.channels."
        names = [name.removeprefix(start) for name in tensors if name.startswith(start)]
        return {name: (tensors[start + name].long(), tensors[f"{kind}.values.{name}"]) for name in names}

    replaced = {n.removeprefix("replaced."): t for n, t in tensors.items() if n.startswith("replaced.")}
    return Patch(note["before"], note["after"], pairs("scaled"), pairs("put"), replaced, note["about"])


def edit_model(model: nn.Module, patch: Patch) -> nn.Module:
    """The edited copy, unchecked."""
    return edit_in_place(copy.deepcopy(model), patch)


def edit_in_place(edited: nn.Module, patch: Patch) -> nn.Module:
    """The model itself, edited; for copies that nobody else has."""
    state = edited.state_dict()  # shares memory with the model
    with torch.no_grad():
        for name, (channels, factors) in patch.scaled.items():
            tensor = state[name]
            wide = factors.to(tensor).view(-1, *[1] * (tensor.dim() - 1))
            tensor[channels] = tensor[channels] * wide
        for name, (channels, values) in patch.put.items():
            tensor = state[name]
            tensor[channels] = values.to(tensor).view(-1, *[1] * (tensor.dim() - 1)).expand_as(tensor[channels])
        for name, value in patch.replaced.items():
            state[name].copy_(value)
    return edited


def plan_edit(model: nn.Module, sites: Sequence[Site], chosen: Mapping[str, tuple[Tensor, Tensor]], edit: str) -> Patch:
    """The patch that weakens the chosen kernels (site → kernels, strengths) by 1 − S; not yet bound to digests.

    `conv` scales the kernel's weight and bias, as printed. `channel` scales what leaves the layer: scale and
    shift of the norm that follows, or weight and bias where none does. A kernel that the channel edit silences
    altogether is set to 0 itself, and its running statistics to those of nothing, so that turning the scale up
    again brings nothing back.
    """
    scaled: dict[str, tuple[Tensor, Tensor]] = {}
    put: dict[str, tuple[Tensor, Tensor]] = {}
    for site in sites:
        if site.name not in chosen:
            continue
        kernels, strong = chosen[site.name]
        factors = (1 - strong).clamp(0, 1)
        for layer in site.layers:
            at = layer.norm if edit == "channel" and layer.norm else layer.name
            for name in _parameters(model, at):
                scaled[name] = (kernels, factors.float())
            gone = kernels[factors == 0]
            if edit == "channel" and layer.norm_kind == "BatchNorm2d" and len(gone):
                for name in _parameters(model, layer.name):
                    put[name] = (gone, torch.zeros(len(gone)))
                for name, value in (("running_mean", 0.0), ("running_var", 1.0)):
                    if f"{layer.norm}.{name}" in dict(model.named_buffers()):
                        put[f"{layer.norm}.{name}"] = (gone, torch.full((len(gone),), value))
    about = {site: {"kernels": k.tolist(), "factors": (1 - s).tolist()} for site, (k, s) in chosen.items()}
    return Patch("", "", scaled, put, {}, {"edit": edit, "sites": about})


def _parameters(model: nn.Module, module: str) -> list[str]:
    return [f"{module}.{name}" for name, _ in model.get_submodule(module).named_parameters(recurse=False)]


def bind_patch(patch: Patch, model: nn.Module, **note: Any) -> Patch:
    """The patch with the digests of the model before and after it, and more of a note."""
    after = tensors_digest(edit_model(model, patch).state_dict())
    return replace(patch, before=tensors_digest(model.state_dict()), after=after, note={**patch.note, **note})


def write_undo(path: Path, patch: Patch, model: nn.Module) -> None:
    """Keep what the patch removes in a file of its own: whoever has it can restore, whoever destroys it cannot."""
    state = model.state_dict()
    if tensors_digest(state) != patch.before:
        raise BadCheckpoint(f"the undo file must be made from the model {patch.before[:12]} that the patch fits")
    write_tensors(path, {name: state[name] for name in patch.names()}, {"before": patch.before, "after": patch.after})


def undo_patch(path: Path, edited: nn.Module) -> nn.Module:
    """The model as it was before the patch, bit for bit."""
    tensors, note = read_tensors(path)
    digest = tensors_digest(edited.state_dict())
    if not {"before", "after"} <= note.keys():
        raise BadCheckpoint(f"{path} is no undo file; give what forget --keep-undo wrote")
    if note["after"] != digest:
        wanted = f"{note['after'][:12]}, not {digest[:12]}"
        raise BadCheckpoint(f"{path} undoes the request that ended in the model {wanted}; give the run of that model")
    restored = edit_model(edited, Patch("", "", replaced=tensors))
    if tensors_digest(restored.state_dict()) != note["before"]:
        raise BadCheckpoint(f"{path} does not give the model {note['before'][:12]} back: it is damaged")
    return restored
