"""The commands journal and bundle: the record of all requests, and evidence for an auditor."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fedortho.cli.console import say, say_json, say_table, words_table
from fedortho.cli.flags import AsJson, DataDir
from fedortho.errors import FedOrthoError
from fedortho.evidence.bundle import make_bundle
from fedortho.evidence.published_head import PublishedHead, publish_head, read_head
from fedortho.evidence.recheck import check_bundle
from fedortho.evidence.signature import make_key
from fedortho.storage.files import file_digest
from fedortho.storage.journal import check_journal
from fedortho.storage.records import is_digest

journal_app = typer.Typer(no_args_is_help=True, help="Check, show or publish the record of all requests.")
bundle_app = typer.Typer(no_args_is_help=True, help="Make or check the evidence of a request, in one file.")

Place = Annotated[Path, Argument(metavar="DIR", help="the directory that holds the runs, or one of them")]


@journal_app.command("head")
def journal_head(
    out_path: Annotated[Path, Option("--out", "-o", help="the file to write, such as head.json")],
    place: Place = Path("runs"),
    sign: Annotated[Path | None, Option(help="sign with this Ed25519 private key (PEM)")] = None,
) -> None:
    """Publish the end of the journal: a file to commit or to keep on another machine, for check --head."""
    head = publish_head(_journal_place(place), out_path, sign)
    signed = f"signed by the key {head.signer}" if head.signer else "not signed: whoever can write it can replace it"
    say(f"{out_path}: entry {head.number} {head.hash}, {signed}")
    say("keep it where those who can write the journal cannot write")


@journal_app.command("check")
def journal_check(
    place: Place = Path("runs"),
    head: Annotated[str, Option(help="a published head (a file) or a noted hash, still in the journal")] = "",
    public: Annotated[Path | None, Option(help="the public key (PEM) that must have signed the head")] = None,
    as_json: AsJson = False,
) -> None:
    """Check that no entry was changed, removed, inserted or reordered; prints the hash of the last one."""
    directory, noted = _journal_place(place), _noted(head, public)
    journal = check_journal(directory, noted if isinstance(noted, str) else noted.head)
    if as_json:
        told = {"entries": len(journal.entries), "head": asdict(journal.last), "is-torn": bool(journal.torn)}
        say_json(told | {"clock-backwards": [entry.number for entry in journal.backward]})
        return
    say(f"{directory / 'journal.jsonl'}: {len(journal.entries)} entries, each following from the one before")
    if journal.torn:
        say("a crash left an incomplete line after the last entry; the next entry moves it to journal.torn")
    for entry in journal.backward:
        say(f"the clock ran backwards: entry {entry.number} is of {entry.time}, before entry {entry.number - 1}")
    if isinstance(noted, PublishedHead):
        signed = f"signed by the key {noted.signer}" if noted.signer else "not signed"
        say(f"entry {noted.number}, published at {noted.time}, is in it ({signed}): nothing before it was changed")
    elif noted:
        say(f"the entry {noted[:16]} is in it: nothing up to there was changed since it was noted")
    else:
        say("publish this head (fedortho journal head): whoever can write both files can also rewrite all hashes")
    say(f"head: {journal.last.number} {journal.last.hash}")


def _noted(head: str, public: Path | None) -> PublishedHead | str:
    """A published head, or a hash that was noted."""
    if not is_digest(noted := head.strip().lower()) and noted:
        return read_head(Path(head), public)
    if public is not None:
        raise FedOrthoError("--public is given without a published head; expected --head FILE")
    return noted


@journal_app.command("show")
def journal_show(place: Place = Path("runs"), as_json: AsJson = False) -> None:
    """List the entries of the journal, after checking it."""
    entries = check_journal(_journal_place(place)).entries
    if as_json:
        say_json([asdict(entry) for entry in entries])
        return
    header = ("", "time (UTC)", "event", "run", "request", "after")
    lines = [
        (str(e.number), e.time[:19].replace("T", " "), e.event, e.run, e.request, (e.after or "–")[:8]) for e in entries
    ]
    say_table(words_table(header, lines))


def _journal_place(place: Path) -> Path:
    return place.resolve().parent if (place / "run.json").exists() else place


@bundle_app.command("make")
def bundle_make(
    run_path: Annotated[Path, Argument(metavar="RUN", help="a run that fedortho forget wrote")],
    request: Annotated[str, Argument(metavar="REQUEST", help="which of its requests, such as class:3")],
    out_path: Annotated[Path, Option("--out", "-o", help="the zip file to write")],
    sign: Annotated[Path | None, Option(help="sign with this Ed25519 private key (PEM)")] = None,
    journal: Annotated[Path | None, Option(metavar="DIR", help="directory of the journal, if not beside RUN")] = None,
) -> None:
    """Write the evidence of a served request into one file, without images and without removed weights."""
    bundle = make_bundle(run_path, request, out_path, sign=sign, journal=journal)
    say(f"{out_path}: {bundle.request.request}, {len(bundle.files)} files")
    for name, command in (("journal.jsonl", ""), ("verdict.json", "judge"), ("report.html", "report")):
        if name not in bundle.files:
            fix = f"fedortho {command} {run_path} writes one" if command else "--journal DIR names its directory"
            say(f"without {name}: there is none for this request; {fix}")
    if bundle.manifest.signer:
        say(f"signed by the key {bundle.manifest.signer}; a signature proves who made it, not that it is true")
    say(f"SHA-256 of the file: {file_digest(out_path)}")
    say(f"digest, to be sent separately, for check --digest: {bundle.manifest.digest}")


@bundle_app.command("check")
def bundle_check(
    file: Annotated[Path, Argument(metavar="FILE", help="a file that fedortho bundle make wrote")],
    model: Annotated[Path | None, Option(help="weights before the request (safetensors), to patch")] = None,
    run_path: Annotated[Path | None, Option("--run", help="the run before the request, to compute all again")] = None,
    audits: Annotated[str, Option(help="audits that --run repeats: names such as C1,C2, quick, all or none")] = "quick",
    references: Annotated[
        list[Path] | None, Option("--reference", help="run of a reference model not beside --run")
    ] = None,
    journal: Annotated[Path | None, Option(metavar="DIR", help="directory of the journal, if not beside --run")] = None,
    head: Annotated[Path | None, Option(help="a published head that its journal lines must lead to")] = None,
    data_dir: DataDir = "",
    public: Annotated[Path | None, Option(help="the public key (PEM) that must have signed it")] = None,
    digest: Annotated[str, Option(help="the digest that bundle make printed")] = "",
    as_json: AsJson = False,
) -> None:
    """Check a bundle and say what was not checked; with --run, measure what it claims again. Exit code 2: refused."""
    keys: dict[str, Any] = {"head": head, "public": public, "digest": digest, "journal": journal}
    again: dict[str, Any] = {"run": run_path, "audits": audits, "references": references or (), "data_dir": data_dir}
    found = check_bundle(file, model=model, **again, **keys)
    if as_json:
        models = {"before": found.bundle.patch.before, "after": found.bundle.patch.after}
        say_json(asdict(found.bundle.request) | models | {"claims": [asdict(claim) for claim in found.claims]})
        return
    say(f"{file}: {found.bundle.request.request}, run {found.bundle.request.run}")
    say(f"model before {found.bundle.patch.before}")
    say(f"model after  {found.bundle.patch.after}")
    for claim in found.claims:
        say(str(claim))


@bundle_app.command("key")
def bundle_key(
    out_path: Annotated[Path, Option("--out", "-o", help="the private key to write, such as my.pem")],
) -> None:
    """Make an Ed25519 key pair for signing bundles; keep the private one, hand out the public one."""
    public, text = make_key(out_path)
    say(f"{out_path}: private, readable by you only; {public}: to hand out")
    say(f"key {text}")
