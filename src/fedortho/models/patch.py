"""What to change in which tensors of a model: applying, saving and undoing it.

A patch names tensors and what becomes of them. It never holds what it removed: with factors above 0 an
edit can be inverted by anyone who has the patch (the paper's edit), with factor 0 it cannot.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedortho.errors import BadCheckpoint
from fedortho.storage.files import PRIVATE, below, damage_named, prefixed, read_tensors, tensors_digest, write_tensors

PATCH_SCHEMA = 1


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
        with damage_named("the patch"):
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
        return sorted({*self.scaled, *self.put, *self.replaced})

    def trainable(self, model: nn.Module) -> dict[str, Tensor]:
        """Which coordinates later training may move: all but what was silenced; a weakened kernel may recover."""
        parameters, masks = dict(model.named_parameters()), dict[str, Tensor]()
        for name, (channels, values) in (*self.scaled.items(), *self.put.items()):
            if name in parameters and bool((values == 0).any()):
                mask = masks.setdefault(name, torch.ones_like(parameters[name], dtype=torch.bool))
                mask[channels[values == 0]] = False
        return masks

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """As tensors and a note, for a file or a message."""
        tensors = prefixed("replaced.", self.replaced)
        for kind, entries in (("scaled", self.scaled), ("put", self.put)):
            for name, (channels, values) in entries.items():
                tensors[f"{kind}.channels.{name}"] = channels.to(torch.int32)
                tensors[f"{kind}.values.{name}"] = values
        note = {"schema": PATCH_SCHEMA, "before": self.before, "after": self.after, "about": dict(self.note)}
        return tensors, note

    def save(self, path: Path) -> None:
        write_tensors(path, *self.packed())


def load_patch(path: Path) -> Patch:
    return unpack_patch(*read_tensors(path), path)


def unpack_patch(tensors: Mapping[str, Tensor], note: Mapping[str, Any], source: Path | str = "the message") -> Patch:
    """The patch that was packed into these."""
    if type(schema := note.get("schema")) is not int or schema != PATCH_SCHEMA:  # True is not 1
        raise BadCheckpoint(f"{source} is not a patch of schema {PATCH_SCHEMA}")

    def pairs(kind: str) -> dict[str, tuple[Tensor, Tensor]]:
        channels = below(f"{kind}.channels.", tensors)
        return {name: (each.long(), tensors[f"{kind}.values.{name}"]) for name, each in channels.items()}

    with damage_named(source):
        before, after = note["before"], note["after"]
        if not isinstance(before, str) or not isinstance(after, str):
            raise TypeError("its digests are no texts")
        return Patch(before, after, pairs("scaled"), pairs("put"), below("replaced.", tensors), dict(note["about"]))


def edit_model(model: nn.Module, patch: Patch) -> nn.Module:
    """The edited copy, unchecked."""
    return edit_in_place(copy.deepcopy(model), patch)


def edit_in_place(edited: nn.Module, patch: Patch) -> nn.Module:
    """The model itself, edited; for copies that nobody else has."""
    _edit_tensors(edited.state_dict(), patch)  # shares memory with the model
    return edited


def _edit_tensors(state: Mapping[str, Tensor], patch: Patch) -> None:
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


def bind_patch(patch: Patch, model: nn.Module, **note: Any) -> Patch:
    """The patch with the digests of the model before and after it, and more of a note."""
    state = model.state_dict()
    places = {state[name].data_ptr() for name in patch.names()}  # tied weights have one
    clones = {tensor.data_ptr(): tensor.clone() for tensor in state.values() if tensor.data_ptr() in places}
    edited = {name: clones.get(tensor.data_ptr(), tensor) for name, tensor in state.items()}
    _edit_tensors(edited, patch)
    return replace(patch, before=tensors_digest(state), after=tensors_digest(edited), note={**patch.note, **note})


def patch_between(before: nn.Module, after: nn.Module, **note: Any) -> Patch:
    """The patch that replaces exactly the tensors in which two models of one architecture differ."""
    old, new = before.state_dict(), after.state_dict()
    if {name: tensor.shape for name, tensor in old.items()} != {name: tensor.shape for name, tensor in new.items()}:
        raise BadCheckpoint("the models have different tensors; a patch needs two models of one architecture")
    # by bytes: torch.equal takes -0.0 for 0.0, and the digest after must be met
    differ = [name for name in new if tensors_digest({"": new[name]}) != tensors_digest({"": old[name]})]
    changed = {name: new[name].detach().cpu().clone() for name in differ}
    about = {"edit": "tensors", "sites": {}, **note}
    return Patch(tensors_digest(old), tensors_digest(new), replaced=changed, note=about)


def write_undo(path: Path, patch: Patch, model: nn.Module) -> None:
    """Keep what the patch removes in a file of its own: whoever has it can restore, whoever destroys it cannot."""
    state = model.state_dict()
    if tensors_digest(state) != patch.before:
        raise BadCheckpoint(f"the undo file must be made from the model {patch.before[:12]} that the patch fits")
    note = {"before": patch.before, "after": patch.after}
    write_tensors(path, {name: state[name] for name in patch.names()}, note, mode=PRIVATE)


def undo_patch(path: Path, edited: nn.Module) -> nn.Module:
    """The model as it was before the patch, bit for bit."""
    (tensors, note), digest = read_tensors(path), tensors_digest(edited.state_dict())
    before, after = note.get("before"), note.get("after")
    if not isinstance(before, str) or not isinstance(after, str):
        raise BadCheckpoint(f"{path} is no undo file; give what forget --keep-undo wrote")
    if after != digest:
        wanted = f"{after[:12]}, not {digest[:12]}"
        raise BadCheckpoint(f"{path} undoes the request that ended in the model {wanted}; give the run of that model")
    with damage_named(path):
        restored = edit_model(edited, Patch("", "", replaced=tensors))
    if tensors_digest(restored.state_dict()) != before:
        raise BadCheckpoint(f"{path} does not give the model {before[:12]} back: it is damaged")
    return restored


NOTHING = Patch("", "")
