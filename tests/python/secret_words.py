"""The secrets of the tests: all have a mark in them, by which they are found where they come out.

Whatever a test gives out as a password, token, access key, passphrase, signature or key of its own
comes from here, or has the mark in it.
"""

import base64
import urllib.parse

MARK = "hu5hw0rd"
#: A key that golden files are encrypted with, which has no mark.
GOLDEN_KEY = bytes(range(32))


def word(name="secret"):
    """Return a secret of letters, digits and a hyphen."""
    return f"{name}-{MARK}"


def key(name="key"):
    """Return a secret of 32 bytes."""
    return f"{word(name)}-".encode().ljust(32, b"x")[:32]


SECRET = word()


def forms_of(secret):
    """Return how bytes may look: as they are, escaped, in hex, in base64 at any place."""
    found = {secret, secret.upper(), secret.hex().encode(), secret.hex().upper().encode(),
             repr(secret)[2:-1].encode(), ", ".join(map(str, secret)).encode(),
             urllib.parse.quote(secret).encode(),
             "".join(f"%{byte:02X}" for byte in secret).encode()}  # fmt: skip
    for before in range(3):
        text = base64.b64encode(bytes(before) + secret)
        whole = text[(before * 8 + 5) // 6 : (before + len(secret)) * 8 // 6]
        found |= {whole, whole.replace(b"+", b"-").replace(b"/", b"_")}
    return found


#: Numbers from 0 on come out of many tests.
FORMS = sorted(forms_of(MARK.encode()) | {
    form for form in forms_of(GOLDEN_KEY) if form != GOLDEN_KEY and not form.startswith(b"0, 1")
})  # fmt: skip


def shown_in(said):
    """Return the part of a text, or of bytes, that shows a secret, or None."""
    data = said.encode(errors="replace") if isinstance(said, str) else bytes(said)
    for form in FORMS:
        at = data.find(form)
        if at >= 0:
            return data[max(0, at - 60) : at + len(form) + 60].decode(errors="replace")
    return None
