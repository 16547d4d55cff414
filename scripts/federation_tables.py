"""Tables of federations: under malice and curiosity, with many clients, and after kills."""

from collections import Counter

from result_text import grid, origin, read


def malice() -> str:
    """What a request ends with, by attack, number of liars and pooling."""
    result, rows = read("malice"), []
    cells: dict[tuple[str, int], dict[str, str]] = {}
    for row in result["rows"]:
        shares = f"{100 * row['forget']:.1f} / {100 * row['retain']:.1f}"
        cells.setdefault((row["attack"], row["liars"]), {})[row["pooling"]] = shares + (
            " **stopped**" * bool(row["stopped"])
        )
    for (attack, liars), found in sorted(cells.items(), key=lambda each: (each[0][1], each[0][0])):
        rows.append([attack, f"{liars} of 100", *(found.get(how, "–") for how in ("sum", "bounded", "trimmed"))])
    header = ["attack", "hostile", "`sum`: forget / retain %", "`bounded`", "`trimmed`"]
    return grid(header, rows) + origin(result)


def server_view() -> str:
    """What the server sees of each message."""
    result = read("privacy")
    rows = [
        [
            row["sums"],
            f"`{row['message']}`",
            str(row["exchanges"]),
            ", ".join(row["contains"]),
            f"{row['bytes-up']:,.0f}",
        ]
        for row in result["rows"]
    ]
    same = "Both requests end with the same model, bit for bit." if result["same_model"] else "The models differ."
    return grid(["sums", "message", "times", "a reply contains", "bytes"], rows) + f"\n{same}\n" + origin(result)


def scale() -> str:
    result = read("scale")
    header = ["clients", "clients compute", "CPU s", "of which server", "ms of server per client", "peak MB"]
    header += ["MB more than before", "MB down", "MB up"]
    rows = []
    for row in result["rows"]:
        server = 1000 * row["cpu_seconds_server"] / row["clients"]
        memory = [str(row["peak_mb"]), str(row["peak_mb"] - row["peak_mb_before"])]
        sent = [f"{row[way] / 1e6:,.1f}" for way in ("bytes_down", "bytes_up")]
        who = "ten, the others repeat them" if row["recorded"] else "all"
        cpu = [f"{row['cpu_seconds']:,.1f}", f"{row['cpu_seconds_server']:,.1f}", f"{server:.1f}"]
        rows.append([f"{row['clients']:,}", who, *cpu, *memory, *sent])
    return grid(header, rows) + origin(result)


def million() -> str:
    """What one request would cost a single server at a million clients, if it goes on as in the largest row."""
    row = max(read("scale")["rows"], key=lambda row: row["clients"])
    times = 1_000_000 / row["clients"]
    cpu, memory = times * row["cpu_seconds_server"], times * (row["peak_mb"] - row["peak_mb_before"]) / 1000
    down, up = (times * row[way] / 1e9 for way in ("bytes_down", "bytes_up"))
    rows = [
        ["CPU of the server", f"{cpu / 60:,.0f} minutes", "one core"],
        ["memory of the server beside the model", f"{memory:,.1f} GB", "message ids, sizes by client, the log"],
        ["sent to clients", f"{down:,.0f} GB", f"{8 * down / 10 / 60:,.1f} minutes at 10 Gbit/s"],
        ["received from clients", f"{up:,.2f} GB", f"{8 * up:,.0f} s at 1 Gbit/s"],
    ]
    return grid(["one request, a million clients, one server", "by proportion", "that is"], rows)


def malice_training() -> str:
    """The accuracy that training ends with, by attack, number of liars and strategy."""
    result = read("malice-training")
    cells: dict[tuple[int, str], dict[str, str]] = {}
    for row in result["rows"]:
        shown = "refused" if row["refused"] else f"{100 * row['accuracy']:.1f}"
        cells.setdefault((row["liars"], row["attack"]), {})[row["strategy"]] = shown
    strategies = [row["strategy"] for row in result["rows"] if not row["liars"]]
    rows = [
        [attack, f"{liars} of 10", *(found.get(each, "–") for each in strategies)]
        for (liars, attack), found in sorted(cells.items())
    ]
    return grid(["attack", "hostile", *(f"{each}: test %" for each in strategies)], rows) + origin(result)


def kills() -> str:
    result = read("kills")
    names = {"all": "driver, server app and clients", "node": "one of two processes with clients"}
    rows = []
    for mode in ("in process", "processes"):
        found = [row for row in result["rows"] if row["mode"] == mode]
        counted = Counter(
            (
                row["what"],
                names.get(row["target"], row["target"]) if mode == "in process" else row["target"],
                row["outcome"],
            )
            for row in found
        )
        rows += [[mode, *key, str(number)] for key, number in sorted(counted.items())]
    early = sum(row["outcome"] == "it had ended" for row in result["rows"])
    lost = sum(row["outcome"].startswith("lost") for row in result["rows"])
    total = f"\n\n{len(result['rows']) - early} kills in {len(result['rows'])} trials, {lost} lost."
    return grid(["where", "killed in", "killed", "in the end", "times"], rows) + total + origin(result)


def rewind() -> str:
    """Rewound and retrained federations: rounds saved and whether they end with the same bytes."""
    result, rows = read("rewind"), []
    names = {"early": "a client drawn early", "late": "a client drawn late", "samples": "100 images of a client"}
    names |= {"together": "two clients in one rewind", "never": "a client that was never drawn"}
    for row in result["rows"]:
        contact = ", ".join(str(each or "never") for each in row["first_contact"])
        saved = f"{row['rounds_saved']} of {row['rounds']}"
        is_equal = "yes" if row["is_equal"] and row["rounds_are_equal"] else "**no**"
        rows.append([names[row["part"]], contact, saved, f"{row['expected_saved']:.1f}", is_equal])
    header = ["request", "first drawn in round", "rounds saved", "by the formula", "same digests as retrained"]
    return grid(header, rows) + origin(result)
