"""The pages: short lines, small tables, the README's shape, and a site without a broken link."""

import ast
import importlib.util
import re
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import pytest

from sortedrl import Controller, EmbeddedEngine, Prompt, Prompts, Schedule, ScoreAtOnce
from sortedrl.core import Sampling
from sortedrl.models import BUILT_IN_MODEL

ROOT = Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*LOG.md")]
WORDS = ("slots", "bubble", "staleness", "cohorts", "harvest")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_are_short_and_tables_small(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [f"{page.name}:{i}" for i, line in enumerate(lines, 1) if len(line) > 120]
    headers = [before for before, line in pairwise(lines) if re.fullmatch(r"\|(-+\|)+", line)]
    assert not [header for header in headers if header.count("|") > 8], "at most seven columns"


def test_the_readme_is_a_landing_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 90
    before_first_table = text[: text.index("\n|")].lower()
    assert all(f"**{word}**" in before_first_table for word in WORDS)
    code = [line for block in text.split("```")[1::2] for line in block.splitlines()]
    assert max(map(len, code)) <= 88, "they scroll on the site"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install '.[docs]'")
    words = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    commands = (tmp_path / "site" / "cli.html").read_text(encoding="utf-8")
    assert "sortedrl train" in commands and "--max-staleness" in commands
    assert "carry_on_during" in (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    for page in (tmp_path / "site").glob("*.html"):  # what Markdown did not recognize as code or as a list
        paragraphs = re.findall(r"<p>.*?</p>", page.read_text(encoding="utf-8"), re.DOTALL)
        assert not [text for text in paragraphs if "```" in text or re.search(r"\n *[-*] ", text)], page.name


def blocks_of(page: str, language: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_page_of_own_loops_has_every_field_of_a_schedule_with_its_default() -> None:
    text = (ROOT / "docs" / "my_loop.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `?([^|`]+)`? \|", text[text.index("| field | default |") :], re.MULTILINE)
    assert {name: ast.literal_eval(default) for name, default in rows} == asdict(Schedule())


def test_the_loss_of_the_page_of_own_loops_has_a_ratio_of_1_for_fresh_tokens() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(BUILT_IN_MODEL).eval()
    tokenizer = AutoTokenizer.from_pretrained(BUILT_IN_MODEL)
    engine = EmbeddedEngine(model, slots=4, eos_token_ids=[tokenizer.eos_token_id], max_length=64)
    prompts = Prompts([Prompt(str(n), tokenizer.encode("Who is a knight?")) for n in range(4)])
    schedule = Schedule(rollouts_per_update=4, prompts_per_cohort=4, max_response_tokens=32)
    controller = Controller(engine, prompts, ScoreAtOnce(len), schedule, sampling=Sampling(temperature=0.8))
    loss = next(block for block in blocks_of("my_loop.md", "py") if "def loss_of" in block)
    names = {"model": model}
    exec(loss, names)
    for rollout in next(iter(controller)):
        found = names["loss_of"](rollout, advantage=2.0)  # type: ignore[operator]
        assert found.item() == pytest.approx(-2.0 * len(rollout), rel=1e-4) and found.requires_grad
