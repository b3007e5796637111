// Looks up words as the search of the built pages does, by the script of the site: search.cjs FOLDER.
//
// Each word must have its page among the first three, by the text of that page.
const fs = require("fs");
const path = require("path");
const vm = require("vm");

// Words, and the pages that answer them, any of which will do.
const PAGES = {
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
  "proxy": "reference/addresses reference/environment",
  "MinIO": "reference/addresses/s3",
  "Azure": "reference/addresses/azure",
  "Lightning": "how-to/trainer",
  "LoRA": "how-to/transformers",
  "mmap": "explanation/mapping",
  "GPUDirect": "explanation/cuda",
  "TorchScript": "reference/operators",
  "AOTInductor": "tutorial/cpp reference/operators",
  "offline": "how-to/cache reference/addresses/hugging-face",
  "async": "how-to/subprocess",
  "OOMKilled": "how-to/tuning",
  "IRSA": "how-to/containers",
  "PVC": "how-to/containers",
  "graceful shutdown": "how-to/containers",
  "SlowDown": "reference/addresses",
  "mTLS": "reference/addresses/http",
  "SAS": "reference/addresses/azure",
  "downgrade": "how-to/production",
  "Slurm": "how-to/tuning",
  "CVE": "explanation/security",
  "autoscaling": "index",
  "AMD": "how-to/install",
  "RLHF": "how-to/new-weights",
  "Alpine": "how-to/install",
  "telemetry": "how-to/production",
  "GGUF": "how-to/convert how-to/sglang",
  "corrupt": "how-to/production",
  "EFS": "how-to/production",
  "Triton": "how-to/vllm",
  "benchmark": "explanation/benchmarks",
  "presigned": "reference/addresses/http reference/addresses/s3",
  "Prometheus": "how-to/production",
  "ulimit": "how-to/production",
  "multi-GPU": "how-to/distributed how-to/load-a-model",
  "cold start": "how-to/production how-to/tuning index",
  "credentials": "reference/addresses",
  "429": "reference/addresses reference/addresses/hugging-face",
  "hash mismatch": "how-to/verify how-to/production",
  "certificate": "reference/addresses/http reference/environment",
  "memory limit": "explanation/cuda how-to/production how-to/containers",
  "air-gapped": "how-to/cache reference/addresses/hugging-face",
};
const FIRST = 3;
// Kinds of messages to the worker of Material for MkDocs.
const SETUP = 0;
const QUERY = 2;

const folder = process.argv[2];
const workers = path.join(folder, "assets/javascripts/workers");
const script = fs.readdirSync(workers).find((name) => name.endsWith(".min.js"));
let receive;
let answered;
const worker = vm.createContext({
  addEventListener: (_, listener) => (receive = listener),
  console,
  postMessage: (message) => answered(message),
});
worker.self = worker;
vm.runInContext(fs.readFileSync(path.join(workers, script), "utf8"), worker);

function ask(message) {
  return new Promise((resolve) => {
    answered = resolve;
    receive({ data: message });
  });
}

async function main() {
  const index = JSON.parse(fs.readFileSync(path.join(folder, "search/search_index.json")));
  await ask({ type: SETUP, data: { ...index, options: {} } });
  const lost = [];
  for (const [words, wanted] of Object.entries(PAGES)) {
    const { items } = (await ask({ type: QUERY, data: words })).data;
    const pages = items.map((item) => [item].flat()[0].location.split(".html")[0]);
    const first = [...new Set(pages)].slice(0, FIRST);
    if (!wanted.split(" ").some((page) => first.includes(page)))
      lost.push(`${words}: expected ${wanted}, found ${first.join(", ") || "nothing"}`);
  }
  console.log(lost.join("\n") || `the search finds the pages of ${Object.keys(PAGES).length} words`);
  process.exitCode = lost.length ? 1 : 0;
}

main();
