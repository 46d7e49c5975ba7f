"""One SLURM for all tests of this folder."""

import pytest

from tests.slurm.cluster import Cluster, obstacle, required


@pytest.fixture(scope="session")
def started(tmp_path_factory):
    """A running SLURM; skips where none can be started, and fails there under CI."""
    why = obstacle()
    if why:
        (pytest.fail if required() else pytest.skip)(why)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    cluster.up()
    yield cluster
    cluster.down()


@pytest.fixture
def cluster(started):
    """The SLURM with an empty queue, also after a test that failed half-way."""
    yield started
    if started.queue():
        started.call("scancel", "--user=root")
        started.wait(lambda: not started.queue(), every=1)
