from collections.abc import Iterator

import pytest
from cluster import Cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    made = Cluster(largest_array=5)  # a table's arrays are cut there, too
    try:
        made.up()
        yield made
    finally:
        made.down()
