"""The Dockerfiles, the workflows and the manifest name what is there, and what they start runs."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tensorizer
import torch
import yaml
from conftest import ROOT
from processes import run_python, start_python
from scripted import FaultServer
from servers import free_port

EXAMPLE = ROOT / "examples/kubernetes"
DOCKERFILES = [ROOT / "tests/packaging/Dockerfile.manylinux", EXAMPLE / "Dockerfile.runtime"]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
#: The targets of the Makefile that are no files.
TARGETS = set(
    re.search(r"(?s)\.PHONY:(.+?)\n\n", (ROOT / "Makefile").read_text())[1]
    .replace("\\", "")
    .split()
)


def steps(workflow):
    """Yield all steps of a workflow."""
    for job in yaml.safe_load(workflow.read_text())["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_names_what_is_there(file):
    text = file.read_text()
    assert f"--file {file.relative_to(ROOT)}" in text
    copied = [
        name
        for line in re.findall(r"(?m)^COPY (?!--from)(.+)$", text)
        for name in line.split()[:-1]
    ]
    assert copied
    # `make wheels` makes dist/, which need not be there.
    assert [name for name in copied if not (ROOT / name).exists() and name != "dist/"] == []
    named = re.findall(r"\bmake ([a-z][\w-]*)", text)
    assert named
    assert set(named) <= TARGETS
    # The list of files that Docker does not send is beside the Dockerfile.
    ignored = file.with_name(f"{file.name}.dockerignore").read_text().splitlines()
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert all(list(ROOT.glob(pattern)) or pattern.startswith("dist/") for pattern in kept)


def test_workflows_only_call_what_can_be_called_here():
    commands = [step["run"] for file in WORKFLOWS for step in steps(file) if "run" in step]
    assert len(commands) == 4
    for command in commands:
        named = re.findall(r"\bmake (?:--silent )?([\w-]+)", command)
        assert set(named) <= TARGETS, command
        assert named or command.endswith(" .ci/run ${{ matrix.stage }}"), command
    wheels = "make wheels-manylinux TORCHES=${{ matrix.torch }} NAME=${{ vars.NAME }} URL="
    assert any(command.startswith(wheels) for command in commands) and "make publish" in commands
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_jobs_are_the_stages_of_a_whole_run():
    stages = set(re.findall(r"(?m)^stage ([a-z-]+) ", (ROOT / ".ci/run").read_text()))
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"]["stage"]["strategy"]["matrix"]["stage"]
    assert set(jobs) == stages - {"system", "build", "packages"}


#: More than a second of CPU time, in one word of a shell.
WORK = "all(map((1.2).__gt__,iter(__import__('time').process_time,0)))"


@pytest.mark.parametrize(
    ("budget", "command", "status", "note"),
    [
        (99, f"python3 -c {WORK}", 0, r"[1-9]\d* s of CPU  docs"),
        (0, "sleep 2", 1, "0 s of CPU  docs  over its budget"),
        (99, "false", 1, "0 s of CPU  docs  FAILED"),
    ],
    ids=["in time", "late", "failing"],
)
def test_a_stage_fails_by_its_command_and_by_its_budget(budget, command, status, note, tmp_path):
    stages = {"system": "true", "build": "true", "docs": command}

    def replaced(stage):
        return f'stage {stage[1]} {budget} "{stages.get(stage[1], "false")}"'

    program = tmp_path / ".ci/run"
    program.parent.mkdir()
    text = (ROOT / ".ci/run").read_text()
    program.write_text(re.sub(r"(?m)^stage ([a-z-]+) .*$", replaced, text))
    done = subprocess.run(["bash", program, "docs"], capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert re.search(rf"(?m) {note}$", done.stdout), done.stdout
    unknown = subprocess.run(["bash", program, "nothing"], capture_output=True, text=True)
    assert (unknown.returncode, "no stage nothing" in unknown.stderr) == (2, True)


def test_the_matrix_has_the_minors_that_are_supported():
    made = subprocess.run(["make", "--silent", "torches"], cwd=ROOT, capture_output=True, text=True)
    oldest, newest = map(
        int, re.search(r"= (\d+)\.\.=(\d+);", (ROOT / "csrc/build.rs").read_text()).groups()
    )
    assert json.loads(made.stdout) == [f"2.{minor}" for minor in range(oldest, newest + 1)]
    for page in ("how-to/install", "reference/compatibility", "index"):
        assert f"2.{oldest} to 2.{newest}" in (ROOT / f"docs/{page}.md").read_text()
    [matrix] = [
        job["strategy"]["matrix"]
        for job in yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())[
            "jobs"
        ].values()
        if "strategy" in job
    ]
    assert matrix == {"torch": "${{ fromJSON(needs.torches.outputs.minors) }}"}


def test_the_release_is_of_this_version(tmp_path):
    """A tag of another version publishes nothing, and neither does a folder without wheels."""
    program = tmp_path / "gh"
    program.write_text('#!/bin/sh\necho "$@" >>"$CALLS"\n')
    program.chmod(0o755)
    calls = tmp_path / "calls"
    path = f"{tmp_path}:{os.environ['PATH']}"
    (tmp_path / "empty").mkdir()
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/tensorizer.whl").touch()
    this = f"v{tensorizer.__version__}"
    cases = (("v0.0.1", "dist", False), (this, "empty", False), (this, "dist", True))
    for tag, folder, published in cases:
        environment = {**os.environ, "PATH": path, "CALLS": str(calls), "TAG": tag}
        command = ["make", "--silent", "publish"]
        command += [f"PYTHON={sys.executable}", f"DIST={tmp_path / folder}"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
        assert (done.returncode == 0, calls.exists()) == (published, published)
    assert calls.read_text().startswith(f"release create v{tensorizer.__version__} --verify-tag")


def test_the_manifest_starts_what_the_image_has():
    [deployment] = yaml.safe_load_all((EXAMPLE / "server.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    image = DOCKERFILES[1].read_text()
    starts = json.loads(re.search(r"ENTRYPOINT (.+)", image)[1])
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["initContainers"] + pod["containers"]:
        command = container.get("command", starts)
        files = [word for word in command if word.endswith(".py")]
        assert all(f"examples/kubernetes/{file}" in image for file in files)
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        for variable in container.get("env", []):
            assert variable["name"] in (ROOT / "src/environment.rs").read_text()
    [server] = pod["containers"]
    answered = set(re.findall(r'"(/\w+)"', (EXAMPLE / "server.py").read_text()))
    probes = [
        server[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")
    ]
    assert set(probes) == answered == {"/ready", "/live"}


def test_the_manifest_is_restricted():
    """By the Pod Security Standard of that name."""
    [deployment] = yaml.safe_load_all((EXAMPLE / "server.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["initContainers"] + pod["containers"]:
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
        assert not {"runAsUser", "runAsNonRoot", "privileged", "seccompProfile"} & own.keys()
        assert all("hostPort" not in port for port in container.get("ports", []))
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
    for volume in pod["volumes"]:
        assert volume.keys() - {"name"} <= allowed | {"projected", "secret"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


#: Runs a program as process 1, which ends with the process that started it, and says its number.
AS_PROCESS_1 = """
import ctypes, os, runpy, signal, sys
NEW_PROCESSES, PARENT_DEATH_SIGNAL = 0x20000000, 1
libc = ctypes.CDLL(None)
if libc.unshare(NEW_PROCESSES):
    sys.exit("unshare: not permitted")
child = os.fork()
if child == 0:
    libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL)
    assert os.getpid() == 1
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
else:
    print(child, flush=True)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("state", ["loaded", "loading"])
def test_the_server_ends_by_a_signal_as_process_1(state, data_server):
    url, hold, asked = data_server
    if state == "loaded":
        hold.set()
    port = free_port()
    command = [AS_PROCESS_1, EXAMPLE / "server.py", url, str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with contextlib.closing(start_python(*command, **pipes)) as outer:
        inner = outer.stdout.readline()
        if not inner:
            said = outer.stderr.read()
            assert b"unshare: not permitted" in said, said
            pytest.skip("only root can make a namespace of processes")
        assert asked.wait(60)
        while state == "loaded":
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready")
                break
            time.sleep(0.01)
        os.kill(int(inner), signal.SIGTERM)
        assert outer.wait(20) == 0


@pytest.fixture
def data_server(tmp_path):
    """Serve a model, whose answers wait until an event is set."""
    path = tmp_path / "m.safetensors"
    tensorizer.save({"a": torch.ones(1_000_000)}, path)
    hold, asked = threading.Event(), threading.Event()

    def wait(number, start, end):
        asked.set()
        hold.wait(60)

    with FaultServer(path.read_bytes(), wait) as server:
        yield server.url, hold, asked
        hold.set()


@pytest.fixture
def address(nginx):
    torch.manual_seed(0)
    tensorizer.save({"a": torch.randn(3000, 2000), "b": torch.ones(3)}, nginx.root / "m.tensors")
    return f"{nginx.http}/m.tensors"


def start(*arguments, **variables):
    return run_python((EXAMPLE / "start.py").read_text(), *arguments, env=os.environ | variables)


def test_a_start_fills_the_cache_and_becomes_the_server(address, nginx, tmp_path):
    cache, port = tmp_path / "cache", free_port()
    done = start("--verify-hash", address, TENSORIZER_CACHE=str(cache))
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith(f"{address}: 0.02 GB in ")
    sent = nginx.sent("m.tensors")
    command = [(EXAMPLE / "start.py").read_text(), "--check", "cpu", address, "--"]
    command += [sys.executable, EXAMPLE / "server.py", address, str(port)]
    environment = os.environ | {"TENSORIZER_CACHE": str(cache)}
    with contextlib.closing(start_python(*command, env=environment)) as server:
        ready = None
        for _ in range(600):
            try:
                ready = urllib.request.urlopen(f"http://127.0.0.1:{port}/ready").read()
                break
            except urllib.error.HTTPError as error:
                assert error.code == 503
            except urllib.error.URLError:
                assert server.poll() is None
            time.sleep(0.1)
        assert json.loads(ready) == {"tensors": 2}
        # It is the same process, so that it gets the signals.
        line = Path(f"/proc/{server.pid}/cmdline").read_text()
        assert "server.py" in line and "start.py" not in line
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other")
        server.terminate()
        assert server.wait(20) == 0
    # Each opening asks for the first MiB again; the data came once.
    size = (nginx.root / "m.tensors").stat().st_size
    assert nginx.sent("m.tensors") - sent < size / 4 < sent


def test_a_start_says_what_is_wrong(address, tmp_path):
    done = start(address, TENSORIZER_CACHE="")
    assert done.returncode == 2
    assert "TENSORIZER_CACHE names no folder" in done.stderr
    done = start(f"{address}.gone", "--", "true", TENSORIZER_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "404" in done.stderr
    # Nothing is kept of a file without an ETag, or in a folder that others may use.
    done = start(address.replace("/m.", "/tagless/m."), TENSORIZER_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert "m.tensors: expected all of its " in done.stderr
    (tmp_path / "open").mkdir(mode=0o755)
    done = start(address, "--", "true", TENSORIZER_CACHE=str(tmp_path / "open"))
    assert done.returncode == 1
    assert "in the cache, found 0: see the warnings above" in done.stderr
    assert "cannot be used" in done.stderr
