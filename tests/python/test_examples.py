"""The examples in Python run."""

from conftest import ROOT, run_python


def test_encryption(tmp_path):
    done = run_python((ROOT / "examples/encryption.py").read_text(), tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "loaded with the right key"
    assert "refused: Tensor decryption failed" in done.stdout or "manifest" in done.stdout
    assert done.stdout.splitlines()[-1] == "loaded with the passphrase"
