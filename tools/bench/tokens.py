"""Compare the CPU time of `tfkit tokens` in a single process with the tokenizers library on the same chunks.

TOKENIZERS_PARALLELISM=false python tools/bench/tokens.py tokenizer.json text.txt
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from tfkit.decoding.text import load_tokenizer
from tfkit.tools.tokens import _text_chunks, write_tokens

MIN_RATIO = 0.95


def seconds(run: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def main() -> int:
    """Print both speeds. Return 1 if tfkit is more than a twentieth slower than the library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    arguments = parser.parse_args()
    library, ours = Tokenizer.from_file(str(arguments.tokenizer)), load_tokenizer(arguments.tokenizer)
    texts = [chunk.texts[0] for chunk in _text_chunks(arguments.text)]

    def encode() -> None:
        for text in texts:
            library.encode_batch_fast([text], add_special_tokens=False)

    def write() -> None:
        with tempfile.TemporaryFile() as file:
            write_tokens(file, [arguments.text], ours, end=None, column="text", processes=1)

    pairs = [(seconds(encode), seconds(write)) for _ in range(arguments.rounds)]
    size, ratio = arguments.text.stat().st_size / 1e6, statistics.median(library / tfkit for library, tfkit in pairs)
    speeds = [size / statistics.median(times) for times in zip(*pairs, strict=True)]
    print(f"library {speeds[0]:.2f} MB/s, tfkit tokens {speeds[1]:.2f} MB/s: {ratio:.3f} of the library's speed")
    return int(ratio < MIN_RATIO)


if __name__ == "__main__":
    sys.exit(main())
