"""The examples of the README run, one after another."""

import os
import re

import pytest
from conftest import ROOT, run_python
from servers import Moto, Redis

#: Documents whose examples need a server of their own, and where they run.
ELSEWHERE = {"addresses.md": "test_hf.py", "cache.md": "test_cache.py"}


@pytest.fixture
def servers(tmp_path_factory):
    """What the README's addresses stand for: lines that come first, and what to replace."""
    moto, redis = Moto(), Redis(tmp_path_factory.mktemp("redis"))
    moto.client().create_bucket(Bucket="bucket")
    host = f"127.0.0.1:{moto.port}"
    yield (
        {
            '"storage.example:9000"': f'"{host}", force_http=True',
            '"cache.example"': f'"127.0.0.1", {redis.port}',
            "//cache.example": f"//127.0.0.1:{redis.port}",
        },
        {
            "AWS_ENDPOINT_URL_S3": f"http://{host}",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        },
    )
    moto.stop()
    redis.stop()


def test_the_examples_of_the_readme(tmp_path, servers):
    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 9
    text = "\n".join(blocks)
    names, environment = servers
    for name, meant in names.items():
        assert name in text
        text = text.replace(name, meant)
    text += "assert torch.equal(model[0].weight, empty[0].weight) and weights['bias'].sum() == 0\n"
    text += "assert torch.equal(parameters['0.weight'].cpu(), model[0].weight)\n"
    text += "assert torch.equal(state_dict['0.weight'].cpu(), model[0].weight)\n"
    text += "assert torch.equal(rows, published['0.weight'][:128])\n"
    script = tmp_path / "readme.py"
    script.write_text(text)
    code = "import runpy, sys; runpy.run_path(sys.argv[1])"
    done = run_python(code, script, cwd=tmp_path, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.tensors").exists()


def test_the_examples_of_the_documents(tmp_path):
    for document in (ROOT / "docs").glob("*.md"):
        if document.name in ELSEWHERE:
            continue
        blocks = re.findall(r"```python\n(.+?)```", document.read_text(), re.DOTALL)
        done = run_python("\n".join(blocks), cwd=tmp_path)
        assert done.returncode == 0, (document, done.stderr)
    for document, test in ELSEWHERE.items():
        assert f'"docs/{document}"' in (ROOT / "tests/python" / test).read_text()
