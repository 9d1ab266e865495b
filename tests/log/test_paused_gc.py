"""The search for reference cycles is off within the block and afterwards as it was before."""

import gc

import pytest

from sortedrl.log.paused_gc import paused_gc


def test_the_search_is_on_again_after_the_outer_block_even_after_an_error() -> None:
    assert gc.isenabled()
    with pytest.raises(KeyError), paused_gc():
        with paused_gc():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
