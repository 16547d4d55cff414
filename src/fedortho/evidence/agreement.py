"""Whether the files of a bundle agree: what two of them tell is the same, and a verdict follows from its audits.

Files that agree can still be invented together: only `claims.py`, with the data at hand, finds that.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fedortho.audits import AUDITS, known_audits
from fedortho.audits.membership import MEMBERSHIP
from fedortho.audits.qualification import Qualification
from fedortho.audits.result import ROUNDING
from fedortho.audits.retention import RETENTION
from fedortho.audits.verdict import DERIVED, Verdict
from fedortho.data.request import ForgetRequest
from fedortho.evaluation.case import REFERENCES
from fedortho.evidence.contents import BadBundle, Bundle, made_here, readme_text
from fedortho.requests.judging import edited_parts
from fedortho.runs.record import ServedRecord
from fedortho.storage.journal import EVENTS, JournalEntry
from fedortho.storage.records import is_digest

KNOWN = f"expected one of {', '.join(EVENTS)}"
NUMBERS = ("value", "limit", "unlearned", "original", "reference")  # of an audit that was run


def check_agreement(bundle: Bundle, verdict_file: dict[str, Any] | None) -> None:
    """Refuse a bundle whose files contradict each other; `verdict_file` is verdict.json as it was read."""
    for place, digest in _digests(bundle).items():
        if digest is not None and not is_digest(digest):
            raise BadBundle(f"{bundle.source}: {place} is {digest!r:.80}; expected 64 digits of lower-case hex")
    entry, digests, patch = bundle.entry, bundle.digests, bundle.patch
    claims: dict[str, tuple[Any, ...]] = {
        "before": (digests.before, patch.before, entry.model_before),
        "after": (digests.after, patch.after, entry.model_after),
        "request": (bundle.request.request, patch.note.get("request"), entry.request),
        "number": (bundle.request.number, len(bundle.request.earlier)),
        "settings": (bundle.settings.forgetting, entry.settings),
        "patch": (digests.patch, bundle.manifest.files["patch.safetensors"].sha256),
        "ledger": (digests.ledger, entry.ledger),
    }
    if bundle.verdict is not None:
        claims |= _verdict_claims(bundle, bundle.verdict)
    for what, values in claims.items():
        if any(value != values[0] for value in values) or (what in ("before", "after", "request") and not values[0]):
            raise BadBundle(f"{bundle.source}: its files disagree about {what}: {', '.join(map(str, values))}"[:300])
    for when, shares in (("before", entry.before), ("after", entry.after)):
        for name, share in asdict(shares).items():
            if not 0 <= share <= 1:
                raise BadBundle(f"{bundle.source}: entry.json: {when}.{name} is {share:g}; expected a share, 0 to 1")
    is_ours = bundle.manifest.made_by == made_here()
    if is_ours and bundle.files["README.txt"] != readme_text(bundle.request, bundle.digests):
        raise BadBundle(f"{bundle.source}: README.txt is not the one that {made_here()} writes")
    if bundle.verdict is not None and verdict_file is not None:
        _check_verdict(bundle, bundle.verdict, verdict_file)
    told = None if bundle.verdict is None else str((verdict_file or {}).get("label", bundle.verdict.label))
    _check_journal(bundle, told)


def _digests(bundle: Bundle) -> dict[str, Any]:
    digests, entry, manifest = bundle.digests, bundle.entry, bundle.manifest
    named = ("before", "after", "run_now", "patch", "data", "ledger")
    every = {f"digests.json: {name}": getattr(digests, name) for name in named}
    every |= {"digests.json: journal.hash": digests.journal.hash if digests.journal else None}
    every |= {"entry.json: model-before": entry.model_before, "entry.json: model-after": entry.model_after}
    every |= {"patch.safetensors: before": bundle.patch.before, "patch.safetensors: after": bundle.patch.after}
    every |= {"manifest.json: digest": manifest.digest, "manifest.json: signer": manifest.signer}
    every |= {f"manifest.json: {name}": file.sha256 for name, file in manifest.files.items()}
    told = {} if bundle.verdict is None else bundle.verdict.digests
    return every | {f"verdict.json: digests.{role}": digest for role, digest in told.items()}


def _verdict_claims(bundle: Bundle, verdict: Verdict) -> dict[str, tuple[Any, ...]]:
    """What the verdict tells of the request; one without any result may tell less."""
    entry, digests, known = bundle.entry, bundle.digests, verdict.digests
    models = [known[role] for role in REFERENCES if role in known]
    others = {known[role] for role in ("before", "after") if role in known}
    claims: dict[str, tuple[Any, ...]] = {
        "the verdict's request": (entry.request, verdict.request),
        "the verdict's method": (entry.method, verdict.method),
        "the verdict's model": (digests.after, known.get("after")),
    }
    claims["a reference model"] = (verdict.has_reference, bool(models))
    claims["reference models that are no other model"] = (len({*models} - others), len(models))
    data = verdict.origin.get("data", {})
    claims["the verdict's data"] = (digests.data, data.get("digest", digests.data) if isinstance(data, dict) else data)
    if verdict.metrics or any(result.outcome != "NOT RUN" for result in verdict.results):
        claims["the verdict's model before"] = (digests.before, known.get("before"))
        claims["the verdict's settings"] = (dict(entry.settings), dict(verdict.settings))
        claims["the verdict's cost"] = (entry.cost, verdict.cost)
        claims["the verdict's effect"] = (entry.effect, verdict.effect)
        claims["what was edited"] = (edited_parts(entry), dict(verdict.edited))
    return claims


def _check_verdict(bundle: Bundle, verdict: Verdict, file: dict[str, Any]) -> None:
    """Refuse a verdict whose sentences do not follow from its audits, or whose outcomes do not follow from numbers."""
    source, entry = bundle.source, bundle.entry
    known = verdict.qualification
    bound_to = (entry.model_before or "", bundle.digests.data, entry.method, entry.settings)
    if known is not None and not known.covers(ForgetRequest.parse(entry.request), *bound_to):
        other = "model, data, method or settings, or the request names more than one class"
        raise BadBundle(f"{source}: verdict.json has a qualification of another {other}")
    for result in verdict.results:
        if result.outcome == "NOT RUN" and (odd := [name for name in NUMBERS if getattr(result, name) is not None]):
            raise BadBundle(f"{source}: verdict.json: {result.name} is NOT RUN, but has a number ({odd[0]})")
        if result.outcome != "PASS":
            continue
        if result.value is not None and result.limit is not None and result.value > result.limit + ROUNDING:
            beyond = f"its value {result.value:.4g} is above its limit {result.limit:.4g}"
            raise BadBundle(f"{source}: verdict.json: {result.name} is PASS, but {beyond}")
        is_alone = result.name in (RETENTION.name, MEMBERSHIP.name)  # they compare with other models
        if not is_alone and not verdict.has_reference:
            raise BadBundle(f"{source}: verdict.json: {result.name} is PASS, but no reference model was measured")
    is_ours = bundle.manifest.made_by == made_here()  # other versions have other audits, limits and words
    tried = () if known is None else _half_tried(known)
    for lie in (*_incomplete(verdict), *tried, *_measured_otherwise(entry, verdict)) if is_ours else ():
        raise BadBundle(f"{source}: verdict.json: {lie}")
    derived = verdict.to_json()
    for key in DERIVED if is_ours else ("passes",):
        if key in file and file[key] != derived[key]:
            told = f"{key} is {file[key]!r:.100}; its numbers give {derived[key]!r:.100}"
            raise BadBundle(f"{source}: verdict.json: {told}")


def _incomplete(verdict: Verdict) -> Iterator[str]:
    """What no verdict of this version lacks or has: each audit once, each metric once, and the audits' own limits."""
    named = Counter(audit.name for audit in verdict.audits)
    yield from (
        f"{name} is there {named[name]} times; expected once"
        for name in sorted({*AUDITS} | {*named})
        if named[name] != 1
    )
    metrics = Counter(metric.name for metric in verdict.metrics)
    yield from (f"the metric {name} is there {number} times" for name, number in metrics.items() if number > 1)
    has_run = any(audit.outcome != "NOT RUN" for audit in verdict.audits)
    if has_run and verdict.retention is None:
        yield "retention is missing, though audits were run"
    for result in verdict.results:
        audit = RETENTION if result is verdict.retention else known_audits().get(result.name)
        own = [] if audit is None else [limit.value for limit in audit.limits]
        if own and result.limit is not None and result.limit not in own:
            yield f"{result.name} has the limit {result.limit:g}; expected {' or '.join(f'{each:g}' for each in own)}"
        if result.outcome == "PASS" and (result.value is None or result.limit is None):
            yield f"{result.name} is PASS, but has no value or no limit"
        if result.outcome == "NO REFERENCE" and verdict.has_reference:
            yield f"{result.name} is NO REFERENCE, but a reference model was measured"


def _half_tried(known: Qualification) -> Iterator[str]:
    """Drawn classes of a qualification that were not audited as `qualify` does: wholly, against reference models."""
    for trial in known.confirmed.classes if known.confirmed else ():
        lacking = [name for name in (*AUDITS, RETENTION.name) if name not in trial.outcomes]
        others = {trial.model: "itself", known.original: "the model before"}
        same = [words for digest, words in others.items() if digest in trial.references]
        if lacking:
            yield f"qualification: {trial.request} has no outcome of {', '.join(lacking)}"
        elif same or not trial.references:
            yield f"qualification: {trial.request} was compared with {same[0] if same else 'no reference model'}"


def _measured_otherwise(entry: ServedRecord, verdict: Verdict) -> Iterator[str]:
    """Accuracies that entry.json tells otherwise; images that were deleted since change them."""
    is_deleted = any(copy.what == "source" and copy.removed for copy in verdict.copies)
    for name, share in {} if is_deleted else asdict(entry.after).items():
        metric = verdict.metric(f"{name}-accuracy")
        if metric is not None and metric.value is not None and abs(metric.value - share) > ROUNDING:
            yield f"{metric.name} is {metric.value:.4g}, but entry.json: after.{name} is {share:.4g}"


def judged_lines(bundle: Bundle) -> list[JournalEntry]:
    """The lines of its journal that tell of a verdict on the model after."""
    entries = bundle.chain.entries
    return [each for each in entries if each.event in ("judged", "verified") and each.after == bundle.digests.after]


def _check_journal(bundle: Bundle, label: str | None) -> None:
    """Refuse lines that do not end where digests.json says, or that tell of a verdict with another label."""
    source, chain, end, verdict = bundle.source, bundle.chain, bundle.digests.journal, bundle.verdict
    if (end is None) != (not chain.entries):
        raise BadBundle(f"{source}: journal.jsonl has {len(chain.entries)} entries; digests.json tells of {end}")
    if end is not None and (chain.last > end.number or chain.hashes.get(end.number, end.hash) != end.hash):
        raise BadBundle(f"{source}: journal.jsonl does not lead to entry {end.number} with the hash {end.hash[:16]}")
    for entry in chain.entries if bundle.manifest.made_by == made_here() else ():  # later versions may have others
        if entry.event not in EVENTS:
            raise BadBundle(f"{source}: journal.jsonl: entry {entry.number} has the event {entry.event!r:.40}; {KNOWN}")
    judged = judged_lines(bundle)
    outcomes = [(e.details.get("label"), e.details.get("passes", verdict and verdict.passes)) for e in judged]
    if verdict is not None and judged and (label, verdict.passes) not in outcomes:
        raise BadBundle(f"{source}: verdict.json says {label!r:.100}; journal.jsonl tells of {outcomes[-1][0]!r:.100}")
