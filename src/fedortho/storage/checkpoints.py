"""Weights that were trained elsewhere: safetensors or a plain state dict, never a file that could run code."""

from pathlib import Path

import torch
from torch import nn

from fedortho.errors import BadCheckpoint
from fedortho.storage.files import read_tensors


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    """The state dict in a safetensors file, or in a .pt file if it holds tensors and nothing else."""
    if not path.is_file():
        raise BadCheckpoint(f"{path} does not exist; give a file of weights")
    if path.suffix == ".safetensors":
        return _without_wrapper(read_tensors(path)[0])
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types here, with one meaning for the user
        raise BadCheckpoint(
            f"{path} is not a plain state dict; files that could run code are never loaded; "
            "save it with safetensors, or torch.save(model.state_dict(), FILE)"
        ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(value, dict) and isinstance(value.get(key), dict):
            value = value[key]
    if not isinstance(value, dict) or not value or not all(isinstance(t, torch.Tensor) for t in value.values()):
        raise BadCheckpoint(f"{path} is not a state dict; expected a mapping of names to tensors")
    return _without_wrapper(value)


def _without_wrapper(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors without the prefix of DataParallel in their names."""
    return {str(name).removeprefix("module."): tensor for name, tensor in state.items()}


def load_weights(model: nn.Module, weights: dict[str, torch.Tensor], source: Path) -> None:
    """Load weights into a model; other names or shapes are refused, the first of them named."""
    mine = model.state_dict()
    missing, extra = sorted(mine.keys() - weights.keys()), sorted(weights.keys() - mine.keys())
    shapes = [n for n in mine.keys() & weights.keys() if mine[n].shape != weights[n].shape]
    if missing or extra or shapes:
        parts = [("lacks", missing), ("has unknown", extra), ("has other shapes for", sorted(shapes))]
        differences = "; ".join(
            f"{what} {', '.join(names[:3])}{' …' if len(names) > 3 else ''}" for what, names in parts if names
        )
        raise BadCheckpoint(f"{source} does not fit the model: it {differences}")
    model.load_state_dict(weights)
