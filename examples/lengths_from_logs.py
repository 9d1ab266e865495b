"""Response lengths from the logs of TRL or verl, for `sortedrl simulate --lengths` and `sortedrl plan --lengths`.

Such logs have the text of each response, so its tokens are counted again. Run it with your model's tokenizer, a folder
or a hub name, on what TRL writes with `log_completions=True` or verl with `trainer.rollout_data_dir=FOLDER`:

    python examples/lengths_from_logs.py TOKENIZER OUTPUT_DIR/completions/*.parquet > mine.jsonl
    python examples/lengths_from_logs.py TOKENIZER FOLDER/*.jsonl > mine.jsonl
"""

import json
import sys

COLUMNS = (("prompt", "completion"), ("input", "output"))  # of TRL and of verl


def rows_of(path):
    if path.endswith(".parquet"):
        from pyarrow import parquet  # pip install '.[data]'

        return parquet.read_table(path).to_pylist()
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def text_of(completion):
    """The text of a completion, or of the assistant's messages in a conversation."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] or "" for message in completion if message["role"] == "assistant")


def lengths_in(path, tokenizer):
    for row in rows_of(path):
        pair = next((pair for pair in COLUMNS if pair[1] in row), None)
        if pair is None:
            sys.exit(f"{path}: no column `completion` (TRL) or `output` (verl) in {list(row)}")
        prompt, response = pair
        ids = tokenizer(text_of(row[response]), add_special_tokens=False).input_ids
        yield {"prompt": json.dumps(row[prompt]), "length": len(ids) + 1}  # one more for EOS, which is not in the text


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    for path in sys.argv[2:]:
        for length in lengths_in(path, tokenizer):
            print(json.dumps(length))
