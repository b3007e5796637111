"""Tables of what a run has found, in Markdown."""

from __future__ import annotations

import statistics

import emulated_step
from comparisons import BASELINES, CASES, Case
from rows import Row, Rows
from sweep import STEP as SWEEP, times


def middle(rows: list[Row], field: str) -> float | None:
    found = [float(row[field]) for row in rows if row.get(field) is not None]
    return statistics.median(found) if found else None


def comparison(rows: Rows, case: Case) -> list[str]:
    """Return the table of a case; ratios are of median rates, above 1 where ours is faster."""
    first, *others = case.engines
    found = {name: rows.of("compare", case=case.name, engine=name) for name in (*others, first)}
    found = {name: mine for name, mine in found.items() if mine}
    if not found:
        return []
    ours = middle(next((m for n, m in found.items() if n.startswith("ours")), []), "rate")
    lines = ["", f"**{case.title}** ({case.name})", "",
             f"| engine | median s | min to max | again s | first tensor, s | GB/s | of a {first} "
             "| ours is faster by |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for name, mine in found.items():
        good = [row for row in mine if row["status"] == "ok"]
        bad = next((row for row in mine if row["status"] != "ok"), None)
        if bad is not None:
            why = " ".join(str(bad["why"]).split())[-160:].replace("|", "/")
            lines.append(f"| {name} | {bad['status']}: {why} | | | | | | |")
        if good:
            lines.append(measured(name, good, ours, is_baseline=name in BASELINES))
    return lines


def measured(name: str, rows: list[Row], ours: float | None, is_baseline: bool) -> str:
    """Return the row of an engine; `ours` is the median rate of ours."""
    rate, seconds = middle(rows, "rate"), sorted(float(row["seconds"]) for row in rows)
    again = [seconds for row in rows for seconds in row.get("again", ())]
    landed, share = middle(rows, "first"), middle(rows, "of_pinned")
    ratio = f"{ours / rate:.2f}{' of it' if is_baseline else ''}" if ours and rate else "-"
    return (
        f"| {'baseline: ' if is_baseline else ''}{name} | {statistics.median(seconds):.3f} "
        f"| {seconds[0]:.3f} to {seconds[-1]:.3f} "
        f"| {f'{statistics.median(again):.3f}' if again else '-'} "
        f"| {'-' if landed is None else f'{landed:.3f}'} | {rate / 1e9:.2f} "
        f"| {'-' if share is None or is_baseline else f'{share:.2f}'} "
        f"| {'-' if name.startswith('ours') else ratio} |"
    )


def swept(rows: Rows) -> list[str]:
    """Return the table of a sweep."""
    mine = [row for row in rows.of(SWEEP, status="ok") if "model" in row]
    if not mine:
        return []
    lines = ["", "**Sweep**", "",
             "| setting | model | rounds | median s | best s | again s | best again s |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in mine:
        groups.setdefault((row["phase"], row["model"], row["setting"]), []).append(row)
    for (_, model, setting), of in groups.items():
        first, again = times(of)
        lines.append(
            f"| {setting} | {model} | {len(of)} | {first:.4f} "
            f"| {min(row['seconds'] for row in of):.4f} | {again:.4f} "
            f"| {min(min(row['again']) for row in of):.4f} |"
        )
    recommended = rows.ends.get(f"{SWEEP}/recommended")
    if recommended is not None:
        values = ", ".join(f"{k}={v}" for k, v in recommended["values"].items())
        lines += ["", f"Recommended: {values or 'the defaults'}."]
    return lines


def report(rows: Rows) -> str:
    """Return all that a run has found."""
    machine = rows.machines[-1] if rows.machines else {}
    lines = [f"{machine.get('device')}, {machine.get('date')}, {machine.get('commit')}", ""]
    tests = [row for row in rows.of("tests") if row["key"] != "tests"]
    counts = {state: sum(row["status"] == state for row in tests) for state in
              ("ok", "absent", "failed")}  # fmt: skip
    lines.append(f"Tests: {counts['ok']} passed, {counts['absent']} skipped, "
                 f"{counts['failed']} failed.")  # fmt: skip
    for row in rows.of("sanitizer"):
        lines.append(f"compute-sanitizer: {row['status']}.")
    for row in rows.of("host-share", status="ok"):
        lines += [f"Host's share: {share}" for share in row["shares"]]
    for model in ("large", "20k"):
        lines += emulated_step.table(rows, model)
    for case in CASES:
        lines += comparison(rows, case)
    lines += swept(rows)
    failures = rows.failures()
    lines += ["", f"{len(failures)} failures."]
    lines += [f"- {row['key']}: {' '.join(str(row['why']).split())[-300:]}" for row in failures]
    return "\n".join(lines) + "\n"
