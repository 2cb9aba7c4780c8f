"""A process that makes a model ready on a device, and says when it was. It imports what an engine needs, no more."""

import json
import sys
import time

import torch

from penstock.bench.gpu_models import load_subject, random_weights


def _main() -> None:
    """The order is JSON; so is the answer, its time of the clock that all processes share."""
    order = json.loads(sys.argv[1])
    device = torch.device(order["device"])
    imported = time.monotonic()
    weights = random_weights(order["name"], order["settings"], device)
    load_subject(weights, getattr(torch, order["dtype"]), device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    print(json.dumps({"imported_s": imported, "ready_s": time.monotonic()}))


if __name__ == "__main__":
    _main()
