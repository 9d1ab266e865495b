import pytest

from sortedrl.core.wording import counted


@pytest.mark.parametrize(("number", "text"), [(0, "0 lines"), (1, "1 line"), (2, "2 lines"), (12345, "12,345 lines")])
def test_one_thing_is_singular(number: int, text: str) -> None:
    assert counted(number, "line") == text
