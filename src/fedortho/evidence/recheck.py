"""Repeat what a bundle claims: apply its patch to the original model, or unlearn again with the data."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedortho.data.request import ForgetRequest
from fedortho.devices import using_threads
from fedortho.errors import FedOrthoError
from fedortho.evidence.bundle import BadBundle, open_bundle
from fedortho.evidence.contents import Bundle
from fedortho.methods import make_method
from fedortho.models.patch import Patch
from fedortho.models.zoo import MODELS, build_model
from fedortho.requests.forgetting import forget_run
from fedortho.runs.run import Run, open_run
from fedortho.runs.served import served_requests
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import load_ledger
from fedortho.storage.checkpoints import load_weights
from fedortho.storage.files import read_tensors, tensors_digest


class _Weights(nn.Module):
    """Weights without a network: a patch can be applied to them and a digest computed."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.tensors = dict(tensors)

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]  # called without arguments
        return self.tensors


def check_bundle(
    path: Path | str,
    *,
    model: Path | str | None = None,
    run: Run | Path | str | None = None,
    data_dir: str = "",
    public: Path | str | None = None,
    digest: str = "",
) -> Bundle:
    """Check a bundle and return it: every byte of it and, with more at hand, what it says.

    With `model`, the weights before the request, the patch must reproduce the model after it bit for bit. With `run`,
    the run before the request, the method must find the same patch on the run's data again. `public` is the key that
    must have signed the bundle, `digest` the digest that its maker gives. Anything else raises an error.
    """
    if data_dir and run is None:
        raise FedOrthoError("--data-dir is given without --run; expected the run before the request")
    bundle = open_bundle(Path(path), digest=digest.strip().lower(), public=None if public is None else Path(public))
    if model is not None:
        reapply_patch(bundle, Path(model))
    if run is not None:
        rerun_decision(bundle, open_run(run), data_dir)
    return bundle


def reapply_patch(bundle: Bundle, model: Path) -> None:
    """Apply the patch to the model before; refused if that is another model or the result has another digest.

    A network of the table is built and must fit the weights. Any other network is not imported, since a bundle must not
    be able to run code; its weights suffice.
    """
    weights = read_tensors(model)[0]
    digest = tensors_digest(weights)
    if digest != bundle.patch.before:
        raise BadBundle(
            f"{model} is the model {digest[:16]}; {bundle.source} has the patch of {bundle.patch.before[:16]}"
        )
    try:
        kind = bundle.settings.model
        network: nn.Module = _Weights(weights)
        if kind.name in MODELS:
            network = build_model(kind.name, num_classes=kind.num_classes, channels=kind.channels)
            load_weights(network, weights, model)
        bundle.patch.apply(network)
    except FedOrthoError as error:
        raise BadBundle(f"{bundle.source}: patch.safetensors does not give the model after: {error}") from error
    except (KeyError, TypeError, IndexError, RuntimeError) as error:  # a forged patch
        raise BadBundle(f"{bundle.source}: patch.safetensors cannot be applied to {model} ({error})") from error


def rerun_decision(bundle: Bundle, run: Run, data_dir: str = "") -> None:
    """Unlearn again with the run before the request and its data; refused if the patch differs."""
    _check_run(bundle, run)
    request = ForgetRequest.parse(bundle.request.request)
    method = make_method(bundle.entry.method, bundle.entry.settings)
    threads = bundle.entry.threads or bundle.environment.run.threads
    with using_threads(threads):
        served = forget_run(run, request, method, data_dir=data_dir, device=bundle.entry.device)
    patch = served.result.patch
    if _saved(patch) != bundle.files["patch.safetensors"]:
        raise BadBundle(
            f"{bundle.source}: decided again with {run.path}, patch.safetensors is another one (it gives the model "
            f"{patch.after[:16]}, not {bundle.patch.after[:16]}); is it the same processor, are the versions those "
            "in environment.json?"
        )


def _check_run(bundle: Bundle, run: Run) -> None:
    if isinstance(run.settings, FederateSettings) and not (run.path / "clients").is_dir():
        how = "its clients decided, on machines of their own"
        raise FedOrthoError(f"{run.path} was trained by a federation: {how}; that cannot be re-run here")
    mine, told = run.record.model.digest, bundle.patch.before
    if mine != told:
        raise FedOrthoError(f"{run.path} is the model {mine[:16]}; give the run of before the request, {told[:16]}")
    earlier = tuple(str(request) for request in served_requests(run))
    ledger = load_ledger(run.path / "ledger.safetensors", run.load_model())
    for what, known, here in (
        ("data", bundle.digests.data, run.record.data.digest),
        ("earlier requests", bundle.request.earlier, earlier),
        ("ledger", bundle.digests.ledger, None if ledger is None else ledger.digest),
    ):
        if known != here:
            raise BadBundle(f"{bundle.source}: {what} of {run.path} are not those it tells of: {here}, not {known}")


def _saved(patch: Patch) -> bytes:
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "patch.safetensors"
        patch.save(file)
        return file.read_bytes()
