"""Loads into a model what serialize.py has saved, and says how long it took, and why.

python examples/deserialize.py [URI] [--model NAME] [--device DEVICE] [--num-readers N]
    [--verify-hash]

URI and NAME are those of serialize.py. With a NAME that has a tokenizer, the model goes on with a
sentence. Needs ``pip install transformers``.
"""

import argparse
import time

import tensorizer
import torch
from small_model import config_of
from tensorizer import TensorDeserializer
from tensorizer.utils import convert_bytes, get_device, get_mem_usage, no_init_or_tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a model of transformers, and measure it.")
    parser.add_argument("uri", nargs="?", default="model.tensors")
    parser.add_argument("--model", metavar="NAME")
    parser.add_argument("--device", type=torch.device, default=get_device())
    parser.add_argument("--num-readers", type=int, metavar="N", help="as many as help, without it")
    parser.add_argument("--verify-hash", action="store_true", help="compare the hashes of the file")
    parser.add_argument("--prompt", default="The quick brown fox")
    args = parser.parse_args()

    # In the block of the device, so that what is no part of the file is made there.
    with args.device, no_init_or_tensor():
        model = AutoModelForCausalLM.from_config(config_of(args.model))

    before = get_mem_usage()
    start = time.perf_counter()
    with TensorDeserializer(
        args.uri, args.device, num_readers=args.num_readers, verify_hash=args.verify_hash
    ) as deserializer:
        count = deserializer.load_into_module(model, strict=True)
    seconds = time.perf_counter() - start

    size = deserializer.total_tensor_bytes
    print(f"loaded {count} tensors, {convert_bytes(size)} to {args.device} in {seconds:.3f} s")
    print(f"that is {convert_bytes(size / seconds)}/s")
    print(f"memory before: {before}")
    print(f"memory after: {get_mem_usage()}")
    stats = tensorizer.stats()
    spent = {name: seconds for name, seconds in stats["stages"].items() if seconds > 0}
    print("seconds of its threads:", ", ".join(f"{name} {spent[name]:.4f}" for name in spent))
    for reason in stats["fallbacks"]:
        print("a slower way was taken:", reason)

    model.eval()
    if args.model is None:
        tokens = torch.tensor([[1, 2, 3]], device=args.device)
        print(model.generate(tokens, max_new_tokens=8, do_sample=False).tolist()[0])
        return
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    given = tokenizer(args.prompt, return_tensors="pt").to(args.device)
    output = model.generate(**given, max_new_tokens=40, pad_token_id=tokenizer.eos_token_id)
    print(tokenizer.decode(output[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
