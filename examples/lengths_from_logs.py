"""Response lengths from the logs of TRL or verl, for `sortedrl simulate --lengths` and `sortedrl plan --lengths`.

Such logs have the text of each response, so its tokens are counted again. Run it with your model's tokenizer, a folder
or a hub name, on what TRL writes with `log_completions=True` or verl with `trainer.rollout_data_dir=FOLDER`:

    python examples/lengths_from_logs.py TOKENIZER OUTPUT_DIR/completions/*.parquet > mine.jsonl
    python examples/lengths_from_logs.py TOKENIZER FOLDER/*.jsonl > mine.jsonl

Add the limit of the run, `--max-response-tokens N`: a response that was cut there has no EOS.
"""

import argparse
import json
import sys

COLUMNS = (("prompt", "completion"), ("input", "output"))  # of TRL and of verl


def rows_of(path):
    try:
        with open(path, "rb") as file:
            if not path.endswith(".parquet"):
                return [json.loads(line) for line in file if line.strip()]
            from pyarrow import parquet  # pip install '.[data]'

            return parquet.read_table(file).to_pylist()
    except OSError as error:
        sys.exit(f"{path}: {error.strerror or error}")
    except ValueError as error:
        sys.exit(f"{path}: {error}")


def text_of(completion):
    """The text of a completion, or of the assistant's messages in a conversation."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] or "" for message in completion if message["role"] == "assistant")


def lengths_in(path, tokenizer, limit=None):
    for row in rows_of(path):
        pair = next((pair for pair in COLUMNS if pair[1] in row), None)
        if pair is None:
            sys.exit(f"{path}: no column `completion` (TRL) or `output` (verl) in {list(row)}")
        prompt, response = pair
        ids = tokenizer(text_of(row[response]), add_special_tokens=False).input_ids
        length = len(ids) + 1  # one more for EOS, which is not in the text
        yield {"prompt": json.dumps(row[prompt]), "length": min(length, limit or length)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", metavar="TOKENIZER")
    parser.add_argument("files", metavar="FILE", nargs="+")
    limit = "max_completion_length of TRL, data.max_response_length of verl"
    parser.add_argument("--max-response-tokens", metavar="N", type=int, help=limit)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    except (OSError, ValueError):
        sys.exit(f"TOKENIZER {args.tokenizer}: neither a folder with a tokenizer nor a name on the Hugging Face hub")
    for path in args.files:
        for length in lengths_in(path, tokenizer, args.max_response_tokens):
            print(json.dumps(length))
