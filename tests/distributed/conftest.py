import pytest
from helpers.sharding import one_rank


@pytest.fixture(scope="module")
def mesh():
    with one_rank() as found:
        yield found
