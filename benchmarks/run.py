"""Measure cases: every engine and round in a process of its own, in turns, every byte compared.

    python benchmarks/run.py [--quick] [--rounds N] [--record] [PATTERN ...]

A pattern is the name of a case, as `tensors/http`, or `formats/*`. `--list` shows all cases.
`--record` keeps the figures in `benchmarks/records` and renews the tables of the documents.
`--quick` takes toy sizes and one round, to see that the programs work. `--device` measures the
cases of a CUDA device instead of the others.

The exit status is 1 if an engine failed, or loaded other bytes than were written, or if one of this
package could not be measured. At toy size a missing server is a failure only if `CI` is true.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cases import ALL
from harness import files, records, report
from harness.case import AbsentError, Case, Engine, Given, is_ours
from harness.process import HERE
from harness.servers import Server, started
from runner import measure, preload


@dataclass
class Session:
    """The options of a run, and what it has found."""

    quick: bool
    rounds: int
    disk: Path
    memory: Path
    scale: float
    engines: list[str]
    rows: list[records.Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def case(self, case: Case) -> bool:
        """Measure a case, print its table, and return whether ours finished all rounds."""
        print(f"{case.name}: {case.title}", flush=True)
        mine = [one.name for one in self.chosen(case) if is_ours(one.name)]
        try:
            rows = list(self.measured(case))
        except AbsentError as absent:
            print(f"  not measured: {absent}", flush=True)
            if mine and (not self.quick or os.environ.get("CI") == "true"):
                self.failures.append(case.name)
            return False
        except Exception as error:
            print(f"  failed: {error!r}", flush=True)
            self.failures.append(case.name)
            return False
        for row in rows:
            if row.get("figures", {}).get("failed"):
                self.failures.append(f"{case.name}, {row['engine']}")
        if rows:
            print(report.table(rows), flush=True)
        self.rows += rows
        finished = {row["engine"] for row in rows if row["n"] == min(self.rounds, case.rounds)}
        return bool(rows) and finished.issuperset(mine)

    def chosen(self, case: Case) -> list[Engine]:
        """Return the engines that are measured."""
        names = self.engines or (self.quick and case.quick) or ()
        return [one for one in case.engines if not names or one.name in names]

    def measured(self, case: Case) -> Iterator[records.Row]:
        """Measure the engines of a case in turns; yield a row for each."""
        engines = self.chosen(case)
        model = files.model_of(case.model, self.quick, self.scale)
        folder = self.memory if case.memory else self.disk
        forms = sorted({one.form for one in engines})
        # The emulators of the hub and the clouds are given one file.
        more = ["safetensors"] if case.model == "gigabyte" else []
        parts = {one.part or case.part for one in engines}
        files.prepare(folder, model, [*forms, *more], parts, self.quick)
        paths = [files.local(folder, model, form) for form in forms if form]
        with (
            started(case.server, folder) as server,
            tempfile.TemporaryDirectory(dir=folder, prefix="out-") as out,
        ):
            base = {"http": f"http://{server.host}", "s3": "s3://bucket"}.get(case.scheme, folder)
            targets = {"objects": "s3://bucket", "gs write": "gs://bucket", "az": "az://bucket"}
            given = {}
            for one in engines:
                slug = re.sub(r"\W+", "-", one.name)
                target = targets.get(case.server, out)
                given[one.name] = Given(
                    folder, str(base), model, one.form, server.host, Path(out, slug),
                    f"{target}/{slug}", self.quick,
                )  # fmt: skip
                Path(out, slug).mkdir(0o700)
            found = self.turns(case, engines, given, server, [*paths, Path(out)])
        for one in engines:
            if found[one.name]:
                yield records.summary(case.name, one.name, one.baseline, found[one.name])

    def turns(
        self, case: Case, engines: list[Engine], given: dict[str, Given], server: Server,
        paths: list[Path],
    ) -> dict[str, list[Mapping[str, Any]]]:  # fmt: skip
        """Let all engines take turns, so that a busy minute of the machine meets all of them."""
        left, found = list(engines), {one.name: [] for one in engines}

        def attempt(work: str, one: Engine) -> Mapping[str, Any] | None:
            try:
                limit = 120 if self.quick else 600
                return measure(work, case, one, given[one.name], env=server.env, timeout=limit)
            except AbsentError as absent:
                print(f"  {one.name}: not measured: {absent}", flush=True)
                if is_ours(one.name):
                    self.failures.append(f"{case.name}, {one.name}")
            except RuntimeError as error:
                print(f"  {one.name} failed: {error}", flush=True)
                self.failures.append(f"{case.name}, {one.name}")
            left.remove(one)
            return None

        for one in engines:
            if one.make is not None:
                attempt("make", one)
        if not case.cold:
            files.warm(paths)
        for _ in range(min(self.rounds, case.rounds)):
            for one in list(left):
                if case.cold:
                    files.forget(paths)
                before = server.counts()
                result = attempt("run", one)
                if result is not None:
                    more = {name: count - before[name] for name, count in server.counts().items()}
                    figures = dict(result.get("figures", {})) | more
                    found[one.name].append({**result, "figures": figures})
                if one.make is None:
                    shutil.rmtree(given[one.name].out)
                    given[one.name].out.mkdir(0o700)
        return found


def arguments() -> argparse.Namespace:
    """Return the options, with the cases that are chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("patterns", nargs="*", metavar="PATTERN", help="cases; all if there is none")
    add("--list", action="store_true", help="only show the cases")
    add("--quick", action="store_true", help="toy sizes and one round")
    add("--record", action="store_true", help="keep the figures, renew the documents")
    add("--report", action="store_true", help="only renew the documents")
    add("--rounds", type=int, default=5)
    add("--device", action="store_true", help="the cases of a CUDA device")
    add("--gigabytes", type=float, default=8, help="the model for devices; small tensors: 1/8")
    add("--engines", nargs="+", default=[], metavar="NAME", help="only these")
    add("--ours", action="store_true", help="only the engines of this package")
    add("--disk", type=Path, default=HERE / "data", help="folder of the models' files")
    add("--memory", type=Path, default=Path("/dev/shm/tensorizer-benchmarks"),
        help="folder of files for devices")  # fmt: skip
    options = parser.parse_args()
    sized = options.gigabytes != parser.get_default("gigabytes")
    some = options.engines or options.ours
    if options.record and (options.quick or some or options.rounds < 3 or sized):
        parser.error("only whole cases at full size, of three rounds or more, are recorded")
    possible = {
        case.name: case
        for case in ALL.values()
        if options.list
        or (case.device == options.device and not (options.quick and case.quick is None))
    }
    named = options.patterns or ["*"]
    for pattern in named:
        if not fnmatch.filter(possible, pattern):
            other = ", but not with these options" if fnmatch.filter(ALL, pattern) else ""
            parser.error(f"{'one' if other else 'no case'} is named {pattern}{other}")
    options.cases = [
        case for name, case in possible.items() if any(fnmatch.fnmatch(name, p) for p in named)
    ]
    if options.ours:
        options.cases = [
            replace(case, engines=tuple(one for one in case.engines if is_ours(one.name)))
            for case in options.cases
        ]
    known = {one.name for case in options.cases for one in case.engines}
    if unknown := set(options.engines) - known:
        parser.error(f"no engine of these cases is named {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    """Measure, print and record."""
    options = arguments()
    if options.list:
        print("\n".join(f"{case.name:28}{case.title}" for case in options.cases))
        return 0
    if options.report:
        report.render()
        return 0
    # Some of what toys import looks for a device, which then no fork could use.
    preload(options.quick and not options.device)
    session = Session(
        options.quick, 1 if options.quick else options.rounds,
        options.disk / ("quick" if options.quick else "full"),
        options.memory / ("quick" if options.quick else "full"),
        1 if options.quick else options.gigabytes / 8, options.engines,
    )  # fmt: skip
    machine = records.describe(options.device)
    print(machine, flush=True)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, session.memory, ignore_errors=True)
        if options.record:
            stack.callback(report.render)
        for case in options.cases:
            before = len(session.rows)
            whole = session.case(case)
            if options.record and whole:
                # Case by case, so that a run that is ended keeps what it has found.
                records.add(records.folder_of(machine), machine, session.rows[before:])
            elif options.record:
                print("  not recorded: the old figures are kept", flush=True)
    if session.failures:
        print(f"{len(session.failures)} failed: {'; '.join(session.failures)}")
    return 1 if session.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
