"""Write the tiny random model that overhead is measured on: `tiny_model.py FOLDER [MODEL]`.

MODEL (default: demo) gives the tokenizer. The same model is made on the fly by `mlx-cb bench`.
"""

import sys
from pathlib import Path

from mlx_cb.bench.tiny import write_tiny_model
from mlx_cb.config import ModelConfig
from mlx_cb.model.resolve import resolve


def main() -> None:
    """Read the two arguments and write the folder."""
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    source = resolve(ModelConfig(model=sys.argv[2] if len(sys.argv) == 3 else "demo"))
    write_tiny_model(source, Path(sys.argv[1]))
    print(f"wrote {sys.argv[1]} with the tokenizer of {source}")


if __name__ == "__main__":
    main()
