"""The lines and tables that bench/gpu.py prints."""

from __future__ import annotations


def header(columns: list[str], unit: str) -> str:
    return (f"{'case':<34} {'pass':<4} " + " ".join(f"{name[-10:]:>10}" for name in columns)
            + f" {'ours/best':>9} {'ms':>9} {'error':>8}   ({unit})")


def line_of(row: dict, columns: list[str], ours: list[str], peers: list[str]) -> str:
    rates = row["tbytes" if row["group"] == "decode" else "tflops"]
    cells = " ".join(f"{rates[name]:>10}" if name in rates else f"{'-':>10}" for name in columns)
    best = max((rates[name] for name in peers if name in rates), default=None)
    mine = max((name for name in ours if name in rates), key=rates.get, default=None)
    ratio = f"{rates[mine] / best:>8.2f}x" if best and mine else f"{'-':>9}"
    error = row["error"].get(mine)
    text = (f"{row['case']:<34} {row['pass']:<4} {cells} {ratio} "
            f"{row['ms'][mine] if mine else float('nan'):>9.4f} "
            f"{f'{error:.1e}' if error is not None else '-':>8}")
    if row["wrong"]:
        text += "  WRONG: " + ", ".join(row["wrong"])
    for name, reason in row["why_not"].items():
        if name in ours:
            text += f"\n      {name}: {reason}"
    return text


def feature_table(rows: list[dict], ours: str) -> str:
    """What each feature costs: its time over the plain problem's."""
    plain = {row["pass"]: row["ms"].get(ours) for row in rows if row["case"] == "feature-plain"}
    lines = [f"\n{'feature':<24} {'fwd ms':>9} {'x plain':>8} {'bwd ms':>9} {'x plain':>8}"]
    for name in dict.fromkeys(row["case"] for row in rows):
        cells = ""
        for which in ("fwd", "bwd"):
            time_of = next((row["ms"].get(ours) for row in rows
                            if row["case"] == name and row["pass"] == which), None)
            known = time_of and plain.get(which)
            cells += f" {time_of:>9.4f}" if time_of else f" {'-':>9}"
            cells += f" {time_of / plain[which]:>7.2f}x" if known else f" {'-':>8}"
        lines.append(f"{name.removeprefix('feature-'):<24}{cells}")
    return "\n".join(lines)


def tuned_table(row: dict) -> str:
    order = sorted(row["ms"], key=row["ms"].get)
    best = row["ms"][order[0]] if order else 0
    lines = [f"\n{row['case']}-{row['pass']}, {row['type']}, sizes {row['sizes']}",
             f"{'ms':>10} {'TFLOP/s':>8} {'x best':>7} {'error':>8}  backend"]
    for name in order:
        error = row["error"].get(name)
        wrong = [text for text in row["wrong"] if text.startswith(name + " ")]
        lines.append(
            f"{row['ms'][name]:>10.4f} {row['tflops'][name]:>8.1f} {row['ms'][name] / best:>6.3f}x "
            f"{f'{error:.1e}' if error is not None else '-':>8}  {name}"
            + (f"  WRONG: {'; '.join(wrong)}" if wrong else "")
            + (f"\n{'':>38}{row['kernel'][name]}" if row["kernel"].get(name) else ""))
    lines += [f"{'-':>10} {'':>8} {'':>7} {'':>8}  {name}: {why}"
              for name, why in row["why_not"].items()]
    return "\n".join(lines)
