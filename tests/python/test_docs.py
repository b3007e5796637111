"""The README and the pages under docs: their examples run, and what they name is there."""

import importlib
import re
import shlex
import urllib.parse

import pytest
from conftest import ROOT
from processes import run_python
from servers import Redis
from tensorizer_cli.arguments import parse

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md"))]
TEXTS += [path for path in [ROOT / "SECURITY.md"] if path.exists()]
#: Titles of blocks that need ranks or a server of their own, and the tests that run them.
ELSEWHERE = {
    "example.py": "test_group.py",
    "train.py": "test_dcp.py",
    "from the hub": "test_hf.py",
    "with a cache": "test_cache.py",
    **dict.fromkeys(
        ("from S3", "in a block", "with adapters", "with diffusers", "with Lightning"),
        "../frameworks/test_examples_in_pages.py",
    ),
}
#: What holds after the examples of a page that do not say so themselves.
HOLDS = {
    "README.md": "assert torch.equal(served.weight.cpu(), model.weight)",
    "docs/reference/addresses/redis.md": "assert state_dict['weight'].cpu().equal(model.weight)",
    "docs/reference/addresses/s3.md": "assert parameters['.weight'].cpu().equal(model.weight)",
    "docs/reference/operators.md": "assert weight_of('weights.tensors').shape == (3, 4)\n"
    "assert elements('weights.tensors') == 15",
}
#: The modules of which every public name is in the reference.
MODULES = (
    *(
        "",
        ".distributed",
        ".lightning",
        ".safetensors",
        ".stream_io",
        ".torch_compat",
        ".transformers",
        ".utils",
    ),
)


def named(paths):
    return {"argvalues": paths, "ids": [str(path.relative_to(ROOT)) for path in paths]}


def blocks(page):
    """Return the examples of a page that run in one process."""
    return re.findall(r"^```python\n(.+?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def shell(text):
    """Return the commands that a text shows, in lines of their own."""
    joined = text.replace("\\\n", " ")
    found = re.findall(r"^```sh\n(.+?)^```", joined, re.DOTALL | re.MULTILINE)
    lines = [line for block in found for line in block.splitlines()]
    return lines + re.findall(r"^    (\S.*)$", joined, re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("page", **named([page for page in PAGES if blocks(page)]))
def test_examples(page, tmp_path, request):
    """One after another, in an empty folder."""
    after = HOLDS.get(str(page.relative_to(ROOT)), "")
    code = "\n".join([*blocks(page), after])
    if "s3://" in code:
        host = request.getfixturevalue("s3").host
        code = code.replace('"storage.example:9000"', f'"{host}", force_http=True')
    server = None
    if "cache.example" in code:
        (tmp_path / "redis").mkdir()
        server = Redis(tmp_path / "redis")
        code = code.replace('"cache.example"', f'"127.0.0.1", {server.port}')
        code = code.replace("//cache.example", f"//127.0.0.1:{server.port}")
    (tmp_path / "empty").mkdir()
    # From a file: TorchScript and spawned processes look for the source.
    script = tmp_path / "page.py"
    script.write_text(code)
    run = "import runpy, sys; runpy.run_path(sys.argv[1])"
    try:
        done = run_python(run, script, cwd=tmp_path / "empty", timeout=280)
    finally:
        if server:
            server.stop()
    assert done.returncode == 0, done.stderr


def test_examples_that_run_elsewhere():
    titles = {
        title
        for page in PAGES
        for title in re.findall(r'^```python title="(.+)"$', page.read_text(), re.MULTILINE)
    }
    assert titles == set(ELSEWHERE)
    for title, test in ELSEWHERE.items():
        assert f'title="{title}"' in (ROOT / "tests/python" / test).read_text()
    for page in PAGES:
        every = re.findall(r"^ *```python.*$", page.read_text(), re.MULTILINE)
        here = [line for line in every if line == "```python" or "title=" in line]
        assert every == here, page


@pytest.mark.parametrize("page", **named(TEXTS))
def test_commands(page):
    """Those of the command are taken by it; files and targets that others name are there."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = page.read_text()
    for line in shell(text):
        if line.startswith("tensorizer ") and "…" not in line:
            try:
                parse(shlex.split(line, comments=True)[1:])
            except SystemExit as ended:
                assert ended.code == 0, line
        for path in re.findall(r"(?<!/)\b(?:benchmarks|examples|tests)/[\w/.-]+\w", line):
            assert (ROOT / path).exists(), line
    made = re.findall(r"^    make ([\w-]+)|`make ([\w-]+)", text, re.MULTILINE)
    assert {name for pair in made for name in pair if name} <= targets


def anchors(path):
    """Return those of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", **named(TEXTS))
def test_links(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        address = urllib.parse.urlsplit(link)
        if address.scheme:
            # Nobody is asked whether it is there.
            assert address.scheme == "https" and "." in address.netloc, link
            continue
        target = page.parent / address.path if address.path else page
        assert target.is_file(), link
        assert not address.fragment or address.fragment in anchors(target), link
    for path in re.findall(
        r"`((?:src|csrc|python|tests|benchmarks|examples|docs)/[\w./-]+)`", text
    ):
        assert (ROOT / path).exists(), path


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("harness.report")


def test_figures_are_those_of_the_records(report):
    texts = report.texts()
    assert {path.name for path in texts} == {"README.md", "benchmarks.md", "report.md"}
    for path, text in texts.items():
        assert path.read_text() == text, f"{path}: run python benchmarks/run.py --report"


def test_every_row_of_figures_states_its_rounds():
    for page, count in (("README.md", 1), ("docs/explanation/benchmarks.md", 2)):
        tables = re.findall(
            r"<!-- \w+: begin -->\n\| (.+) \|\n\|[-|]+\n((?:\|.+\n)+)", (ROOT / page).read_text()
        )
        assert len(tables) == count
        for head, rows in tables:
            at = [name.strip() for name in head.split("|")].index("rounds")
            for row in rows.splitlines():
                assert re.search(r"\d", row.strip("|").split("|")[at]), row


def test_the_page_of_figures_is_short():
    text = (ROOT / "docs/explanation/benchmarks.md").read_text()
    written = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    assert len(written.split()) <= 1500


def test_the_pages_are_short():
    """A reader finds what is written once; the reference of Python is made of its docstrings."""
    texts = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    words = [len(path.read_text().split()) for path in texts if path.exists()]
    assert max(words) <= 3000
    assert sum(words) <= 42_000


def row(engine, median, baseline=False, **figures):
    figures = {name.replace("_", " "): value for name, value in figures.items()}
    common = {"case": "tensors/read", "n": 5, "bytes": 10, "min": median, "max": median}
    return common | {"engine": engine, "median": median, "baseline": baseline, "figures": figures}


def test_losses_are_every_row_where_another_package_is_faster(report):
    rows = [
        row("tensorizer", 2.0),
        row("tensorizer mmap", 1.0),
        row("tensorizer 2.12.1", 2.5),
        row("faster", 1.6),
        row("two threads read", 0.1, baseline=True),
    ]
    (loss,) = report.losses({"tensors/read": ({}, rows)}, "")
    assert loss.line() == "| tensors/read | faster | 5 | 0.80 | 1.60 mmap |"
    text = report.table(rows)
    assert "| **0.80** |" in text and "| 1.25 |" in text and "baseline: two threads" in text


def test_a_loss_by_another_time_than_the_whole_is_listed(report):
    rows = [
        row("tensorizer", 2.0, again_s=1.0),
        row("tensorizer iterate", 2.0, again_s=1.5, first_tensor_s=0.5),
        row("iterator", 3.0, again_s=1.2, first_tensor_s=0.4),
        row("loader", 3.0, again_s=1.1),
    ]
    found = [loss.line() for loss in report.losses({"tensors/read": ({}, rows)}, "")]
    assert found == [
        "| tensors/read, again | iterator | 5 | 0.80 |  |",
        "| tensors/read, first tensor | iterator | 5 | 0.80 |  |",
    ]


def test_losses_on_every_machine_are_listed(report, tmp_path):
    records = importlib.import_module("harness.records")
    rows = [row("tensorizer", 2.0), row("faster", 1.6)]
    for machine in (report.CPU, "another"):
        records.add(tmp_path / machine, {"commit": "a"}, rows)
    assert report.lost(tmp_path).splitlines()[2:] == [
        "| tensors/read | faster | 5 | 0.80 |  |",
        "| tensors/read (another) | faster | 5 | 0.80 |  |",
    ]


def test_rows_of_one_run_are_kept_together(tmp_path, report):
    records = importlib.import_module("harness.records")
    for case in "xy":
        records.add(tmp_path, {"commit": "a"}, [{"case": case}])
    ((_, rows),) = records.read(tmp_path / records.NEWEST)
    assert [one["case"] for one in rows] == ["x", "y"]


def test_records_keep_the_two_last_figures_of_each_case(report, tmp_path):
    records = importlib.import_module("harness.records")
    for commit, cases in (("a", "xy"), ("b", "x"), ("c", "xz"), ("d", "z")):
        records.add(tmp_path, {"commit": commit}, [{"case": case} for case in cases])
    kept = {
        name: {case: run[0]["commit"] for case, run in records.by_case(tmp_path / name).items()}
        for name in (records.NEWEST, records.PREVIOUS)
    }
    assert kept == {
        "newest.jsonl": {"y": "a", "x": "c", "z": "d"},
        "previous.jsonl": {"x": "b", "z": "c"},
    }


def clicks(start, most):
    """Return the pages that are so many links, or fewer, away from a page."""
    found = {start}
    for _ in range(most):
        for page in list(found):
            links = re.findall(r"\]\(([^)#:]+\.md)", page.read_text())
            found |= {(page.parent / link).resolve() for link in links}
    return found


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("convert", "how-to/convert.md"),
        ("verify", "how-to/verify.md"),
        ("transformers", "how-to/transformers.md"),
        ("from_pretrained", "how-to/load-a-model.md"),
        ("hf://", "how-to/load-a-model.md"),
        ("AWS", "how-to/load-a-model.md"),
        ("performance", "how-to/tuning.md"),
        ("performance", "explanation/benchmarks.md"),
        ("vLLM", "how-to/vllm.md"),
    ],
)
def test_a_page_begins_with_the_words_that_it_is_searched_by(word, page):
    """Each is two clicks from the start, whether that is the README or the site."""
    path = ROOT / "docs" / page
    assert word in path.read_text()[:700].replace(word.capitalize(), word)
    assert path in clicks(ROOT / "README.md", 2)
    assert path in clicks(ROOT / "docs/index.md", 2)


@pytest.mark.parametrize("page", **named(PAGES))
def test_no_page_has_targets(page):
    assert not re.search(r"\| (asked|reached) \||\bAsked (is|was)\b", page.read_text())


def test_every_public_name_is_in_the_reference():
    folder = ROOT / "docs/reference/python"
    shown = {
        name
        for page in folder.glob("*.md")
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    }
    overview = folder.with_suffix(".md").read_text()
    assert {page.name for page in folder.glob("*.md")} == set(
        re.findall(r"\(python/(.+?\.md)\)", overview)
    )
    public = {
        f"tensorizer{module}.{name}"
        for module in MODULES
        for name in importlib.import_module(f"tensorizer{module}").__all__
        if not name.startswith("_")
    }
    modules = {f"tensorizer{module}" for module in (*MODULES, ".serialization")}
    #: What a module gives on is shown where most programs import it from.
    assert {name for name in public - modules - shown if name.count(".") == 1} == set()
    last = {name.rpartition(".")[2] for name in shown}
    assert {name for name in public - modules if name.rpartition(".")[2] not in last} == set()


def test_the_header_is_in_the_reference():
    header = (ROOT / "python/tensorizer/include/tensorizer/tensorizer.h").read_text()
    names = re.findall(
        r"^inline \S+ (\w+)\(|^  std::optional<.+> (\w+);|^  bool (\w+) ", header, re.M
    )
    found = {name for each in names for name in each if name}
    assert found >= {"load", "load_into", "names", "save", "device", "verify", "num_readers", "key"}
    reference = (ROOT / "docs/reference/cpp.md").read_text()
    assert {name for name in found if not re.search(rf"`{name}[`(]", reference)} == set()


def test_each_row_of_the_security_page_names_existing_tests():
    text = (ROOT / "docs/explanation/security.md").read_text()
    rows = re.findall(r"^\| (?!cannot|---)(.+) \| (.+) \|$", text, re.MULTILINE)
    assert len(rows) > 25
    tests = [
        path for folder in ("python", "rust") for path in (ROOT / "tests" / folder).glob("*.*")
    ]
    tests += (ROOT / "src").rglob("tests.rs")
    there = set(re.findall(r"\b(?:def|fn) (\w+)\(", "".join(p.read_text() for p in tests)))
    for what, shown in rows:
        names = re.findall(r"`(\w+)`", shown)
        assert names, what
        assert set(names) <= there, what
