"""The examples of the README run, one after another."""

import re

from conftest import ROOT, run_python


def test_the_examples_of_the_readme(tmp_path):
    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    script = tmp_path / "readme.py"
    check = "assert torch.equal(model[0].weight, empty[0].weight) and weights['bias'].sum() == 0\n"
    script.write_text("\n".join(blocks) + check)
    code = "import runpy, sys; runpy.run_path(sys.argv[1])"
    done = run_python(code, script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "model.tensors").exists()


def test_every_environment_variable_is_in_the_readme():
    table = (ROOT / "src/source/http/options.rs").read_text()
    rows = re.findall(r'name: "(\w+)",\s+default: (\d+),\s+meaning: "(.+?)"', table)
    assert len(rows) == table.count("Variable {") - 1
    readme = (ROOT / "README.md").read_text()
    for name, default, meaning in rows:
        assert f"| `{name}` | {default} | {meaning} |" in readme
