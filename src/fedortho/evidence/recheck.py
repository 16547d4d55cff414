"""Check a bundle: apply its patch to the original model, or unlearn and measure again with the data."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedortho.data.images import Dataset
from fedortho.data.request import ForgetRequest
from fedortho.devices import using_threads
from fedortho.errors import FedOrthoError
from fedortho.evaluation.case import COUNTERFACTUALS, REFERENCES
from fedortho.evidence import claims
from fedortho.evidence.agreement import judged_lines
from fedortho.evidence.bundle import open_bundle
from fedortho.evidence.claims import BundleCheck, Findings
from fedortho.evidence.contents import BadBundle, Bundle, made_here
from fedortho.evidence.published_head import PublishedHead, read_head
from fedortho.methods import make_method
from fedortho.models.patch import Patch
from fedortho.models.zoo import MODELS, build_model
from fedortho.requests.forgetting import ServedRequest, forget_run
from fedortho.runs.run import Run, open_run, served_requests
from fedortho.runs.settings import FederateSettings
from fedortho.statistics.ledger import load_ledger
from fedortho.storage.checkpoints import load_weights
from fedortho.storage.files import read_tensors, tensors_digest
from fedortho.storage.journal import check_journal

APPLIED = "applying the patch to the model before gives the model after, bit for bit"


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
    audits: str = "quick",
    references: Sequence[Run | Path | str] = (),
    journal: Path | str | None = None,
    head: Path | str | None = None,
    data_dir: str = "",
    public: Path | str | None = None,
    digest: str = "",
) -> BundleCheck:
    """Check a bundle: every byte of it and, with more at hand, what it claims; `claims` tells what was not checked.

    With `model`, the weights before the request, the patch must reproduce the model after it bit for bit. With `run`,
    the run before the request, everything is computed again on the run's data and compared: the patch, the accuracies,
    the verdict's metrics and `audits` (names, `quick`, `all` or `none`) against the reference models that lie beside
    the run or are among `references`, the report, and the journal's lines (of `journal`, default: beside the run).
    `head` is a published head that the lines must lead to, `public` the key that must have signed bundle and head,
    `digest` the digest that its maker gives. A claim that is not true raises an error that names it.
    """
    for given, flag in ((data_dir, "--data-dir"), (references, "--reference"), (audits != "quick", "--audits")):
        if given and run is None:
            raise FedOrthoError(f"{flag} is given without --run; expected the run before the request")
    if journal is not None:
        check_journal(Path(journal))  # refuses a directory that has none
    public = None if public is None else Path(public)
    bundle, found = open_bundle(Path(path), digest=digest.strip().lower(), public=public), Findings()
    found.checked(f"every digest of {len(bundle.files)} files, every byte of the archive, and that the files agree")
    for name, words in (("verdict.json", "verdict.json: no audit"), ("report.html", "report.html")):
        if name not in bundle.files:
            found.absent(words)
    _tell_maker(found, bundle, digest, public)
    if model is not None:
        reapply_patch(bundle, Path(model))
    _follow_chain(found, bundle, None if head is None else read_head(Path(head), public))
    beside = None if run is None else open_run(run).path.absolute().parent
    if journal is not None or (beside is not None and (beside / "journal.jsonl").exists()):
        claims.check_lines(found, bundle, Path(journal or beside or ""), is_given=journal is not None)
    if run is None:
        _tell_unmeasured(found, bundle, has_model=model is not None)
    else:
        _measure_again(found, bundle, open_run(run), audits, [open_run(each) for each in references], data_dir)
    if bundle.digests.run_now != bundle.digests.after:
        found.unchecked(f"what the run has done since, which made it the model {bundle.digests.run_now[:16]}")
    found.unchecked(
        "times, costs, ticket, clients that took part, copies of the images, name of the run, environment of its "
        "maker: nobody else can measure them"
    )
    if found.lies:
        raise BadBundle(f"{bundle.source}: {'; '.join(found.lies)}")
    return BundleCheck(bundle, tuple(found.made))


def _tell_maker(found: Findings, bundle: Bundle, digest: str, public: Path | None) -> None:
    mine, signer, maker = bundle.manifest.digest, bundle.manifest.signer, bundle.manifest.made_by
    if maker != made_here():
        found.unchecked(f"README.txt, and which audits, limits and words {maker} has: this is {made_here()}")
    unknown = f"whether it is the bundle that was made: compare {mine} with what its maker says (--digest)"
    found.either(bool(digest), "its digest is the given one", unknown)
    if signer is None:
        found.absent("signature")
    else:
        known = "signed by the given key, which proves who made it and not that it is true"
        unknown = f"who made it: signed by the key {signer}; --public compares it with one that you know"
        found.either(public is not None, known, unknown)


def _follow_chain(found: Findings, bundle: Bundle, head: PublishedHead | None) -> None:
    """Follow the journal's lines to their end, and to a published head."""
    end, hashes = bundle.digests.journal, bundle.chain.hashes
    if end is None:
        found.absent("journal.jsonl: no line of a journal tells of this request")
        if head is not None:
            raise BadBundle(f"{bundle.source} has no journal.jsonl; there is nothing that leads to the published head")
        return
    if not any(entry.after == bundle.digests.after for entry in bundle.chain.entries):
        found.absent("a line of journal.jsonl that tells of the model after")
    elif bundle.verdict is not None and not judged_lines(bundle):
        found.absent("a line of journal.jsonl that tells of the verdict")
    told = None if bundle.verdict is None else bundle.verdict.label
    others = {each.number: each.details.get("label") for each in judged_lines(bundle)} if told else {}
    if others := {number: label for number, label in others.items() if label != told}:
        listed = ", ".join(f"entry {number}, {label!r:.100}" for number, label in others.items())
        found.unchecked(f"why journal.jsonl tells of other verdicts on this model: {listed}")
    follows = f"journal.jsonl: its lines from entry {min(hashes, default=0)} on lead to entry {end.number}, {end.hash}"
    gap = f"journal.jsonl: whether its lines belong to a chain to entry {end.number}: some are not here"
    found.either(end.number in hashes, follows, gap)
    if head is None:
        found.unchecked(f"whether entry {end.number} was published: --head FILE")
        return
    if hashes.get(head.number, head.hash) != head.hash:
        raise BadBundle(f"{bundle.source}: journal.jsonl is of another journal than the published entry {head.number}")
    follows = f"journal.jsonl: its lines up to entry {head.number} belong to the chain published at {head.time}"
    gap = f"whether journal.jsonl leads to the published entry {head.number}, which it does not reach"
    found.either(head.number in hashes, follows, gap)


def _tell_unmeasured(found: Findings, bundle: Bundle, *, has_model: bool) -> None:
    """Name the claims that only the run and its data could confirm."""
    entry, verdict = bundle.entry, bundle.verdict
    found.either(has_model, APPLIED, "whether the patch gives the model after: --model")
    found.unchecked("whether the method finds this patch on the data: --run")
    shares = f"forget {entry.before.forget:.1%} to {entry.after.forget:.1%}, retain to {entry.after.retain:.1%}"
    found.unchecked(f"accuracies, said to be {shares}: --run measures them")
    if verdict is not None:
        found.unchecked(f"the verdict, said to be {verdict.label!r}: no audit was repeated here; --run repeats them")
    if "report.html" in bundle.files:
        found.unchecked("report.html, whether it shows what the records say: --run renders it again")


def _measure_again(found: Findings, bundle: Bundle, run: Run, audits: str, given: Sequence[Run], data_dir: str) -> None:
    verdict, request = bundle.verdict, ForgetRequest.parse(bundle.request.request)
    if verdict is not None:
        claims.chosen_audits(verdict, audits)  # refuses unknown names before anything is computed
    data = run.load_data(data_dir)
    served = rerun_decision(bundle, run, data_dir, data)
    found.checked(APPLIED)
    found.checked("the method finds the same patch on the data again")
    known, roles = {} if verdict is None else verdict.digests, (*REFERENCES, *COUNTERFACTUALS)
    wanted = [known[role] for role in roles if role in known]
    again = claims.Repeated(run, data, served, claims.references_of(run, request, given, wanted))
    claims.check_entry(found, bundle, again)
    with claims.derived_run(bundle, again) as derived, using_threads(run.settings.threads):
        if verdict is not None:
            claims.check_verdict(found, bundle, verdict, derived, again, audits)
        if "report.html" in bundle.files:
            claims.check_report(found, bundle, derived, again)


def reapply_patch(bundle: Bundle, model: Path) -> None:
    """Apply the patch to the model before; refused if that is another model or the result has another digest.

    A network of the table must fit the weights. Any other is not imported, as no bundle may run code: weights suffice.
    """
    weights = read_tensors(model)[0]
    digest, wanted = tensors_digest(weights), bundle.patch.before
    if digest != wanted:
        raise BadBundle(f"{model} is the model {digest[:16]}; {bundle.source} has the patch of {wanted[:16]}")
    try:
        kind = bundle.settings.model
        network: nn.Module = _Weights(weights)
        if kind.name in MODELS:
            network = build_model(kind.name, num_classes=kind.num_classes, channels=kind.channels)
            load_weights(network, weights, model)
        bundle.patch.apply(network)
    except (FedOrthoError, LookupError, TypeError, RuntimeError) as error:  # of a forged patch or network
        raise BadBundle(f"{bundle.source}: patch.safetensors does not give the model after: {error}") from error


def rerun_decision(bundle: Bundle, run: Run, data_dir: str = "", data: Dataset | None = None) -> ServedRequest:
    """Unlearn again with the run before the request and its data; refused if the patch differs."""
    _check_run(bundle, run)
    request = ForgetRequest.parse(bundle.request.request)
    method = make_method(bundle.entry.method, bundle.entry.settings)
    with using_threads(bundle.entry.threads or bundle.environment.run.threads):
        served = forget_run(run, request, method, data=data, data_dir=data_dir, device=bundle.entry.device)
    patch = served.result.patch
    if _saved(patch) != bundle.files["patch.safetensors"]:
        raise BadBundle(
            f"{bundle.source}: decided again with {run.path}, patch.safetensors is another one (it gives the model "
            f"{patch.after[:16]}, not {bundle.patch.after[:16]}); are processor, vector instructions and versions "
            "those in environment.json? A later request for samples purges the ledger, too: then train or import the "
            "run again"
        )
    return served


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
