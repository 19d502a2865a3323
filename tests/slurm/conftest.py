from collections.abc import Iterator

import pytest
from cluster import Cluster, two_nodes


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with two_nodes(largest_array=5) as made:  # a table's arrays are cut there, too
        yield made
