"""The project as a stranger finds it: examples run, the wheel installs, the README's commands do what it says."""

import json
import os
import re
import resource
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from sortedrl.engines.lengths import read_lengths
from sortedrl.models import BUILT_IN_MODEL

ROOT = Path(__file__).parent.parent


# Quick tests cover what these two show: tests/integrations/test_trl_*.py, tests/engines/test_hugging_face_example.py.
LONG = ("trl_grpo", "hugging_face_engine")
EXAMPLES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in LONG else [])
    for path in sorted((ROOT / "examples").glob("*.py"))
    if path.stem != "lengths_from_logs"  # below
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_run(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(example)]
    environment = {"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "HF_HUB_DISABLE_TELEMETRY": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert "update" in done.stdout


def test_every_environment_for_tests_has_a_limit_per_test() -> None:
    """Without the plugin pytest only warns that it does not know the option."""
    files = [ROOT / "Makefile", ROOT / "tests" / "with_sglang" / "requirements.txt", ROOT / "pyproject.toml"]
    installed = [line for line in files[0].read_text().splitlines() if "pip install" in line and " pytest" in line]
    assert len(installed) == 4, "vLLM, verl, verifiers, Ray"
    assert all("pytest-timeout" in line for line in installed)
    assert all("pytest-timeout" in file.read_text() for file in files[1:])


def test_lengths_are_counted_in_the_logs_of_trl_and_verl(tmp_path: Path) -> None:
    from pyarrow import Table, parquet
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(BUILT_IN_MODEL)
    conversation = [{"role": "user", "content": "Who is a knight?"}]
    call = {"role": "assistant", "content": None}  # of a tool, without text
    answer = [call, {"role": "tool", "content": "17"}, {"role": "assistant", "content": "Bob is a knave."}]
    in_trl = {"step": [1], "prompt": [conversation], "completion": [answer], "advantage": [0.5]}
    parquet.write_table(Table.from_pydict(in_trl), tmp_path / "completions_00001.parquet")
    row = {"input": "Who?", "gts": "Bob", "score": 1.0, "step": 1}
    in_verl = [row | {"output": text} for text in ("Bob.", "Bob, I say.")]
    (tmp_path / "1.jsonl").write_text("\n".join(map(json.dumps, in_verl)) + "\n\n")
    lengths_in = runpy.run_path(str(ROOT / "examples" / "lengths_from_logs.py"))["lengths_in"]
    files = [str(tmp_path / name) for name in ("completions_00001.parquet", "1.jsonl")]
    found = [row for file in files for row in lengths_in(file, tokenizer)]
    texts = ["Bob is a knave.", "Bob.", "Bob, I say."]
    assert [row["length"] for row in found] == [len(tokenizer(text).input_ids) + 1 for text in texts]
    assert found[1]["prompt"] == found[2]["prompt"] != found[0]["prompt"]
    limit = len(tokenizer(texts[2]).input_ids)
    cut = [row["length"] for row in lengths_in(str(tmp_path / "1.jsonl"), tokenizer, limit)]
    assert cut == [found[1]["length"], limit], "a response that was cut has no EOS"
    mine = tmp_path / "mine.jsonl"
    mine.write_text("\n".join(map(json.dumps, found)))
    assert [len(lengths) for lengths in read_lengths(mine).by_prompt] == [1, 2]
    with pytest.raises(SystemExit, match=r"mine.jsonl: no column `completion` .* in \['prompt', 'length'\]"):
        list(lengths_in(str(mine), tokenizer))


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("missing.jsonl", None, "missing.jsonl: No such file or directory"),
        ("broken.jsonl", '{"output": ', "broken.jsonl: Expecting value"),
        ("missing.parquet", None, "missing.parquet: No such file or directory"),
        ("broken.parquet", "no Parquet", "broken.parquet: Could not open Parquet input source"),
    ],
)
def test_a_log_that_cannot_be_read_is_one_line(name: str, content: str | None, expected: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    rows_of = runpy.run_path(str(ROOT / "examples" / "lengths_from_logs.py"))["rows_of"]
    with pytest.raises(SystemExit, match=re.escape(expected)) as error:
        rows_of(str(tmp_path / name))
    assert len(str(error.value).splitlines()) == 1


def test_the_loop_is_100_lines_without_our_abstractions() -> None:
    text = (ROOT / "examples" / "the_loop_in_100_lines.py").read_text()
    assert len(text.splitlines()) <= 100
    assert "import sortedrl" not in text and "from sortedrl" not in text


def test_the_project_keeps_its_bounds() -> None:
    size = runpy.run_path(str(ROOT / "scripts" / "size.py"))
    assert {what: lines for what, lines in size["sizes"]().items() if lines > size["BOUNDS"][what]} == {}


def readme_commands(first_words: str) -> list[list[str]]:
    """The README's commands that begin with these words, comments cut off."""
    lines = (ROOT / "README.md").read_text().splitlines()
    found = [line.split("#")[0].split() for line in lines if line.startswith(first_words)]
    assert found, f"the README has no command {first_words}"
    return found


@pytest.mark.slow
def test_the_readme_s_simulate_and_plan_commands_run(tmp_path: Path) -> None:
    lengths = [json.dumps({"prompt": f"p{i % 300}", "length": 40 + 37 * i % 4000}) for i in range(900)]
    (tmp_path / "mine.jsonl").write_text("\n".join(lengths) + "\n")
    for words in [*readme_commands("sortedrl simulate"), *readme_commands("sortedrl plan")]:
        done = run_sortedrl(words[1:], tmp_path)
        assert done.returncode == 0, done.stderr
        assert "partial+elevator" in done.stdout


@pytest.mark.slow
def test_the_default_training_run_learns_within_five_minutes(tmp_path: Path) -> None:
    """Of a core: on a busy machine it takes longer."""
    before = cpu_seconds_of_children()
    # One thread: two wait for each other, and for minutes, where the machine has other work.
    done = run_sortedrl(["train", "--json", "--threads", "1"], tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["gain"]["value"] >= 0.10
    assert summary["gain"]["low"] > 0
    assert cpu_seconds_of_children() - before < 300
    assert summary["metrics"]["bubble"] < 0.10
    assert (tmp_path / summary["folder"] / "model" / "config.json").exists()


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_sortedrl(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", "sortedrl", *words], os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=folder, env=environment)


@pytest.mark.slow
def test_a_wheel_is_built_installed_and_works(tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=600)
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    run(sys.executable, "-m", "build", "--outdir", str(tmp_path / "dist"), str(ROOT))
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    (source,) = (tmp_path / "dist").glob("*.tar.gz")
    assert source.stat().st_size < 6e6, "no measured data"
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    bin = tmp_path / "venv" / "bin"
    run(str(bin / "pip"), "install", "--quiet", str(wheel))
    assert run(str(bin / "sortedrl"), "--version").startswith("sortedrl 0.")
    printed = run(str(bin / "sortedrl"), "simulate", "--cohorts", "1", "--modes", "baseline", "partial")
    assert "partial" in printed
    assert run(str(bin / "sortedrl"), "plan", "--cohorts", "1")
    code = "import sortedrl, importlib.resources as r; r.files(sortedrl).joinpath('py.typed').read_text()"
    run(str(bin / "python"), "-c", code)
    assert "update" in run(str(bin / "python"), str(ROOT / "examples" / "bring_your_own_engine.py"))
    missing = subprocess.run([str(bin / "sortedrl"), "train"], capture_output=True, text=True, cwd=tmp_path)
    assert missing.returncode == 2
    assert "pip install '.[train]'" in missing.stderr
