"""Tables of federations under malice and curiosity."""

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
        rows.append([attack, f"{liars} of 10", *(found.get(how, "–") for how in ("sum", "bounded", "trimmed"))])
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
