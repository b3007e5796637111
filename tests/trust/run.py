"""Runs the campaigns of `campaigns.json` one after the other, and prints one table of all.

A campaign is a program that runs for about the seconds that it is given, and whose last line is
JSON: `campaign`, `inputs` and `what` they are, `of` how many there are if that is known, `findings`
(texts), `seconds`, or `skipped` and why. In the list it has a name, the tools that it needs, its
share of the time, and its command, in which `{seconds}`, `{seed}` and `{python}` are filled in.

With `--record` its rows replace those of the same campaigns in the table of a page, where each row
has the commit, the date and the machine of its own run.
"""

import argparse
import datetime
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("campaigns.json")
#: The page with the table of long runs.
PAGE = "tests/trust/README.md"
HEAD = ["| campaign | inputs | of these | findings | seconds | commit | date | machine |",
        "|---|---|---|---|---|---|---|---|"]  # fmt: skip
#: Seconds that a campaign may take to begin and to end, beside those that it is given.
MORE = 600


def campaigns(only: list[str]) -> list[dict]:
    """Return the listed campaigns, or some of them."""
    listed = json.loads(LIST.read_text())
    unknown = set(only) - {row["name"] for row in listed}
    if unknown:
        raise SystemExit(f"no such campaign: {', '.join(sorted(unknown))}")
    return [row for row in listed if row["name"] in only or not only]


def run(row: dict, seconds: float, seed: int) -> dict:
    """Run a campaign; return what it says, or what became of it."""
    missing = [tool for tool in row.get("needs", []) if tool != "python" and not shutil.which(tool)]
    if missing:
        return {"skipped": f"{', '.join(missing)} not installed"}
    filled = {"seconds": f"{seconds:.0f}", "seed": str(seed), "python": sys.executable}
    command = shlex.split(row["command"].format(**filled))
    # The package of this tree is found before others of its name.
    paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    try:
        done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True,
                              timeout=seconds * 2 + MORE, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"findings": ["it does not end"]}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    try:
        said = json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"findings": [f"it ends with {done.returncode} and says nothing"]}
    if done.returncode and not said.get("findings"):
        said["findings"] = [f"it ends with {done.returncode}"]
    return said


def machine() -> str:
    """Return what this runs on, in words."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return f"{os.cpu_count()} cores, {os.uname().machine}, {memory} GiB"


def commit() -> str:
    """Return the commit, and whether files differ from it, other than the page of results."""
    ask = ["git", "-C", str(ROOT)]
    found = subprocess.run([*ask, "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                           check=False).stdout.strip()  # fmt: skip
    others = ["--", ".", f":(exclude){PAGE}"]
    changed = subprocess.run([*ask, "diff", "--quiet", "HEAD", *others], check=False).returncode
    return (found or "no commit") + (" with changes" if changed else "")


def detail(said: dict) -> str:
    """Return the kinds of inputs, most first."""
    kinds = sorted(said.get("kinds", {}).items(), key=lambda kind: -kind[1])
    shown = ", ".join(f"{name} {count:,}" for name, count in kinds[:6])
    return shown + (f", and {len(kinds) - 6} kinds more" if len(kinds) > 6 else "")


def row_of(name: str, said: dict, run_of: str) -> str:
    """Return the row of a campaign, of a run that has a commit, a date and a machine."""
    if "skipped" in said:
        return f"| {name} | not run: {said['skipped']} | | | | {run_of} |"
    inputs = f"{said.get('inputs', 0):,} {said.get('what', '')}".strip()
    inputs += f", of {said['of']:,}" if "of" in said else ""
    found, seconds = len(said.get("findings", [])), f"{said.get('seconds', 0):.0f}"
    return f"| {name} | {inputs} | {detail(said)} | {found} | {seconds} | {run_of} |"


def table(rows: dict[str, str]) -> str:
    """Return rows in Markdown, in the order of the list."""
    order = [row["name"] for row in campaigns([])]
    return "\n".join([*HEAD, *(rows[name] for name in order if name in rows)]) + "\n"


def recorded(page: str, rows: dict[str, str]) -> str:
    """Return a page whose table has these rows in the place of those before."""
    before, _, after = page.partition("\n".join(HEAD) + "\n")
    lines = after.splitlines(keepends=True)
    count = next((n for n, line in enumerate(lines) if not line.startswith("|")), len(lines))
    kept = {line.split("|")[1].strip(): line.rstrip("\n") for line in lines[:count]}
    return before + table(kept | rows) + "".join(lines[count:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="for all together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="a page with a table that gets the rows")
    parser.add_argument("only", nargs="*", help="names of campaigns")
    arguments = parser.parse_args()
    rows = campaigns(arguments.only)
    shares = sum(row.get("share", 1) for row in rows)
    results = []
    today = datetime.datetime.now(datetime.timezone.utc).date()
    run_of = f"{commit()} | {today} | {machine()}"
    for row in rows:
        seconds = max(1.0, arguments.seconds * row.get("share", 1) / shares)
        print(f"{row['name']}: {seconds:.0f} s", file=sys.stderr, flush=True)
        said = run(row, seconds, arguments.seed)
        results.append((row["name"], said))
        # Written after each campaign, so that a run that is ended loses nothing.
        if arguments.record:
            page = arguments.record.read_text() if arguments.record.exists() else ""
            new = {row["name"]: row_of(row["name"], said, run_of)}
            arguments.record.write_text(recorded(page, new))
    print(table({name: row_of(name, said, run_of) for name, said in results}), end="")
    findings = [f"- {name}: {text}" for name, said in results for text in said.get("findings", [])]
    print("".join(f"{line}\n" for line in ["", *findings] if findings), end="")
    sys.exit(any(said.get("findings") for _, said in results))


if __name__ == "__main__":
    main()
