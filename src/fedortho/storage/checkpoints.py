"""Weights that were trained elsewhere: safetensors or a state dict, never a file that could run code."""

import logging
import re
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from fedortho.errors import BadCheckpoint
from fedortho.storage.files import read_tensors

logger = logging.getLogger(__name__)
NESTED = ("state_dict", "model_state_dict", "net", "model")  # keys under which a checkpoint keeps the weights
PREFIX = re.compile(r"(module|_orig_mod|model)\.")  # of DataParallel, torch.compile, and Lightning
WEIGHT_NORM = {"_g": "_v", ".original0": ".original1"}  # how it names lengths and directions, before and now
Shapes = Mapping[str, Tensor]
ODD = ("meta", "quantized", "nested")  # kinds of tensors that are not read


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in a safetensors file, or in a file of torch.save that holds tensors and plain values only."""
    if not path.is_file():
        raise BadCheckpoint(f"{path} {'is a directory' if path.is_dir() else 'does not exist'}; give a file of weights")
    if path.suffix == ".safetensors":
        return plain_weights(read_tensors(path)[0], path)
    try:
        with suppress(zipfile.BadZipFile), zipfile.ZipFile(path) as archive:  # old files are no archives
            if sum(info.file_size for info in archive.infolist()) > path.stat().st_size:  # torch.save packs nothing
                raise BadCheckpoint(f"{path} is packed and would grow when it is read; write it with torch.save")
        value = torch.load(path, map_location="cpu", weights_only=True)
    except BadCheckpoint:
        raise
    except Exception as error:  # torch raises many types here, with one meaning for the user
        why = "files that could run code are never loaded" if path.stat().st_size else "it is empty"
        advice = "save it with safetensors, or torch.save(model.state_dict(), FILE)"
        raise BadCheckpoint(f"{path} is not a plain state dict; {why}; {advice}") from error
    while isinstance(value, dict) and (inner := [key for key in NESTED if isinstance(value.get(key), dict)]):
        value = value[inner[0]]
    if not isinstance(value, dict) or not value or not all(isinstance(t, Tensor) for t in value.values()):
        keys = f" under the keys {', '.join(map(str, value))[:200]}" if isinstance(value, dict) else ""
        expected = f"expected names and tensors, at the top or under {', '.join(NESTED)}"
        raise BadCheckpoint(f"{path} is not a state dict: it has a {type(value).__name__}{keys}; {expected}")
    return plain_weights({str(name): tensor for name, tensor in value.items()}, path)


def plain_weights(weights: Shapes, source: Path) -> dict[str, Tensor]:
    """The weights as they are; tensors without values of their own, and kinds that no network here has, are refused."""
    for name, tensor in weights.items():
        odd = [kind for kind in ODD if getattr(tensor, f"is_{kind}")] + ["complex"] * tensor.is_complex()
        if tensor.layout != torch.strided:
            odd.append("sparse")
        elif not odd and tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            odd.append("larger than its data")
        if odd:
            raise BadCheckpoint(f"{source}: {name[:80]} is {odd[0]}; expected a dense tensor of real numbers")
    return dict(weights)


def fitted_weights(model: nn.Module, weights: Shapes, source: Path) -> dict[str, Tensor]:
    """Weights as others save them, in the model's names and types; infinite values and NaN are refused.

    Prefixes of wrappers are removed from names that the model does not know. Counters of batches, which nothing of ours
    reads, may be missing. Other precisions become those of the model.
    """
    mine, found = model.state_dict(), dict[str, Tensor]()
    for name, tensor in fold_weight_norm(weights).items():
        own = name.replace("._orig_mod.", ".")  # parts may be compiled too
        while own not in mine and (prefix := PREFIX.match(own)):
            own = own[prefix.end() :]
        own = own if own in mine else name
        if own in found:
            raise BadCheckpoint(f"{source} has {own} twice, under {name} and another name; save one of them")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise BadCheckpoint(f"{source}: {name} has values that are NaN or infinite; save a checkpoint from before")
        found[own] = tensor
    other = {t.dtype for n, t in found.items() if n in mine and t.is_floating_point() and t.dtype != mine[n].dtype}
    if other:
        logger.info("%s: weights become float32 (were %s)", source.name, ", ".join(sorted(map(str, other))))
    counters = {name: tensor for name, tensor in mine.items() if name.endswith("num_batches_tracked")}
    return counters | {name: tensor.to(mine[name].dtype) if name in mine else tensor for name, tensor in found.items()}


def fold_weight_norm(weights: Shapes) -> dict[str, Tensor]:
    """The state dict with plain weights where weight norm kept lengths (`weight_g`) and directions (`weight_v`)."""
    folded = dict(weights)
    for name in weights:
        for lengths, directions in WEIGHT_NORM.items():
            if (rows := folded.get(name.removesuffix(lengths) + directions)) is None or not name.endswith(lengths):
                continue
            plain = name.removesuffix(lengths).replace("parametrizations.", "")
            over = [axis for axis, size in enumerate(folded[name].shape) if size == 1]
            folded[plain] = rows * (folded.pop(name) / torch.linalg.vector_norm(rows, dim=over, keepdim=True))
            del folded[name.removesuffix(lengths) + directions]
    return folded


def load_weights(model: nn.Module, weights: dict[str, Tensor], source: Path) -> None:
    """Load weights into a model; other names or shapes are refused, the first of them named with the likely cause."""
    mine = model.state_dict()
    missing = [name for name in mine if name not in weights]
    extra = [name for name in weights if name not in mine]
    shapes = [name for name in mine if name in weights and mine[name].shape != weights[name].shape]
    if missing or extra or shapes:
        both = [f"{n} ({_shape(weights[n])}, not {_shape(mine[n])})" for n in shapes]
        parts = {"lacks": missing, "has unknown": extra, "has other shapes for": both}
        more = {what: f" and {len(names) - 3} more" * (len(names) > 3) for what, names in parts.items()}
        differences = [f"{what} {', '.join(names[:3])}{more[what]}" for what, names in parts.items() if names]
        cause = _likely_cause(mine, weights, missing, extra, shapes)
        raise BadCheckpoint(f"{source} does not fit the model: it {'; '.join(differences)}; likely cause: {cause}")
    model.load_state_dict(weights)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "one value"


def _likely_cause(mine: Shapes, weights: Shapes, missing: list[str], extra: list[str], shapes: list[str]) -> str:
    """Why weights do not fit a model, as far as names and shapes tell."""
    for names, others, whose in ((extra, missing, "the file's"), (missing, extra, "the model's")):
        longer = [name for name in names if others and name.endswith(f".{others[0]}")]
        if longer:
            return f"{whose} names begin with {longer[0].removesuffix(others[0])!r}; rename the tensors"
    classifiers = {([n for n in each if each[n].dim() == 2] or [""])[-1].rpartition(".")[0] for each in (mine, weights)}
    if all(name.rpartition(".")[0] in classifiers for name in [*missing, *extra, *shapes]):
        rows = [_shape(each[shapes[-1]]).partition("x")[0] for each in (weights, mine)] if shapes else []
        classes = f"{rows[0]} classes, the model {rows[1]}" if rows else "another name"
        return f"another classifier: the file's has {classes}"
    if not missing and not extra:
        return "the same architecture with another width, or for images with another number of channels"
    if len(missing) + len(extra) < len(mine) / 2:
        return "a variant of this architecture (biases, norms, shortcuts or depth); make the model as the file's was"
    return "another architecture; --model must make the network that was saved"
