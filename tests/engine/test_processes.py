"""Several processes under `jax.distributed`: the same federation, spread over hosts."""

import json
import socket
import subprocess
import sys
import textwrap

import jax
import numpy as np
import pytest

import priory

pytestmark = pytest.mark.slow  # two processes that import, compile, stop and resume

CHILD = """
    import json, sys
    import jax
    number, port, data, out, cache = int(sys.argv[1]), *sys.argv[2:]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    import numpy as np
    import priory
    from priory.engine import runner
    runner.LOOK_SECONDS = 0.0
    runner.COMMIT_SECONDS = -1.0 if number == 0 else 1e9  # clocks differ; the first one decides
    federation = priory.data.from_arrays(**np.load(data), test=0.2, seed=0)
    asked = iter([False, False, True])
    half = priory.simulate(priory.Ditto(), federation, model="linear", rounds=4, cohort=3, seed=0, eval_every=0,
                           out=out, stop=(lambda: next(asked)) if number == 0 else (lambda: False))
    assert half.completed == 2, half.completed
    run = priory.resume(out, federation=federation)
    print(json.dumps({
        "server": np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(run.server)]).tolist(),
        "accuracy": run.personal.accuracy,
        "nll": run.personal.nll,
        "probabilities": run.predict(3, federation.x[:4]).probabilities.tolist(),
    }))
"""


@pytest.fixture(scope="module")
def told(arrays, tmp_path_factory, pytestconfig):
    """What each of two processes found, and the directory that the first one wrote."""
    place = tmp_path_factory.mktemp("processes")
    np.savez(place / "data.npz", **arrays)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rest = [str(port), str(place / "data.npz"), str(place / "run"), jax.config.jax_compilation_cache_dir]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(CHILD), str(number), *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=pytestconfig.rootpath,
        )
        for number in range(2)
    ]
    try:
        said = [child.communicate(timeout=180) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, said, strict=True):
        assert child.returncode == 0, errors[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in said], place / "run"


def test_two_processes_that_stop_and_resume_give_the_server_of_one_process_with_two_devices(told, simulate):
    alone = simulate()
    expected = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(alone.server)])
    for found in told[0]:
        np.testing.assert_allclose(found["server"], expected, atol=1e-6)
        assert found["accuracy"] == alone.personal.accuracy
        np.testing.assert_allclose(found["nll"], alone.personal.nll, rtol=1e-5)


def test_two_processes_know_the_same_clients(told, federation, simulate):
    expected = simulate().predict(3, federation.x[:4]).probabilities
    for found in told[0]:
        np.testing.assert_allclose(found["probabilities"], expected, atol=1e-6)


def test_what_two_processes_wrote_one_process_reads(told, federation, simulate, assert_close):
    assert_close(simulate(), priory.load(told[1], federation=federation), atol=1e-6)
