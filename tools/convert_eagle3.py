"""Makes `model.safetensors` of the `pytorch_model.bin` of an EAGLE-3 head.

    pip install safetensors torch
    python tools/convert_eagle3.py DIR

`load_head` reads safetensors only. A `pytorch_model.bin` is a pickle, which may hold code: torch
reads it with ``weights_only=True``, which refuses everything but tensors and plain containers.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

SOURCE, WEIGHTS = "pytorch_model.bin", "model.safetensors"
OLDEST_TORCH = (2, 6)  # before, weights_only=True could be tricked into running code


def convert(directory: Path) -> list[str]:
    """Writes the safetensors file beside the other one; names of the tensors."""
    import torch
    from safetensors.torch import save_file

    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        raise SystemExit(f"torch must be 2.6 or newer, but is {torch.__version__}.")
    source, weights = directory / SOURCE, directory / WEIGHTS
    if not source.is_file():
        raise SystemExit(f"{source} does not exist.")
    if weights.exists():
        raise SystemExit(f"{weights} exists already.")
    held: Any = torch.load(source, map_location="cpu", weights_only=True)
    if not isinstance(held, dict) or not held:
        raise SystemExit(f"{source} must hold tensors by name, but holds a {type(held).__name__}.")
    for name, tensor in held.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise SystemExit(f"{source} holds {name!r}, which is not a tensor with a name.")
    # Copies, because safetensors refuses tensors that share memory.
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in held.items()}
    save_file(tensors, weights, metadata={"format": "pt"})
    return sorted(tensors)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help=f"holds config.json and {SOURCE}")
    directory = parser.parse_args().directory
    try:
        names = convert(directory)
    except ImportError as error:
        raise SystemExit(f"{error}; pip install safetensors torch") from error
    print(f"{directory / WEIGHTS}: {', '.join(names)}", file=sys.stderr)


if __name__ == "__main__":
    main()
