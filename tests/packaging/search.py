"""Looks up words in the index of the built pages, as their search does: search.py FOLDER.

Each word must have its page among the first three, by the text of that page.
"""

import json
import re
import sys
from pathlib import Path

import lunr
from lunr.stop_word_filter import WORDS

#: The pages that answer a search, any of which will do.
PAGES = {
    "install": "how-to/install",
    "pip": "how-to/install",
    "wheel": "how-to/install",
    "arm64": "how-to/install",
    "Windows": "how-to/install reference/compatibility",
    "macOS": "how-to/install reference/compatibility",
    "glibc": "how-to/install reference/compatibility",
    "uninstall": "how-to/install",
    "OOM": "how-to/tuning",
    "out of memory": "how-to/tuning",
    "quantised": "how-to/transformers",
    "quantized": "how-to/transformers",
    "NFS": "how-to/production",
    "Lustre": "how-to/production",
    "retry": "how-to/production reference/addresses",
    "timeout": "how-to/production reference/addresses",
    "rollback": "how-to/production",
    "license": "how-to/load-a-model how-to/install",
    "gated model": "how-to/load-a-model",
    "HF_TOKEN": "how-to/load-a-model reference/addresses/hugging-face",
    "tensor parallel": "how-to/distributed",
    "FSDP": "how-to/distributed",
    "DCP": "how-to/distributed",
    "multi node": "how-to/distributed",
    "safetensors": "how-to/safetensors",
    "convert": "how-to/convert",
    "checksum": "how-to/verify",
    "sha256": "how-to/verify",
    "encrypt": "how-to/encryption",
    "vLLM": "how-to/vllm",
    "SGLang": "how-to/sglang",
    "Kubernetes": "how-to/containers",
    "Docker": "how-to/containers",
    "proxy": "reference/addresses",
    "MinIO": "reference/addresses/s3",
    "Azure": "reference/addresses/azure",
    "Lightning": "how-to/trainer",
    "LoRA": "how-to/transformers",
    "mmap": "explanation/mapping",
    "GPUDirect": "explanation/cuda",
    "TorchScript": "reference/operators",
    "AOTInductor": "tutorial/cpp",
    "offline": "how-to/cache reference/addresses/hugging-face",
    "async": "how-to/subprocess",
}
FIRST = 3


def main(folder: str) -> int:
    """Print the words whose page is not found; return 1 if there are any."""
    rows = json.loads((Path(folder) / "search/search_index.json").read_text())["docs"]
    for row in rows:
        row["text"] = re.sub("<[^>]+>", " ", row["text"])
    fields = [{"field_name": "title", "boost": 1000}, "text"]
    index = lunr.lunr(ref="location", fields=fields, documents=rows)
    lost = []
    for words, wanted in PAGES.items():
        query = " ".join(f"+{word}" for word in words.split() if word not in WORDS)
        pages = dict.fromkeys(hit["ref"].partition(".html")[0] for hit in index.search(query))
        first = [page for page in pages if page][:FIRST]
        if not set(wanted.split()) & set(first):
            lost.append(f"{words}: expected {wanted}, found {', '.join(first) or 'nothing'}")
    print("\n".join(lost) or f"search finds the pages of {len(PAGES)} words")
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
