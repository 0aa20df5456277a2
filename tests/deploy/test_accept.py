"""What the server makes of a reply: only an honest answer to what was asked counts, and every other has a reason."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core.struct import replace
from priory.deploy import wire
from priory.deploy.accept import Accepted, Refused, validate_reply
from priory.deploy.client import Client
from priory.deploy.examples import of_client
from priory.deploy.exchange import Reply
from priory.fed import screen, visit
from priory.fed.thin import Thin
from priory.methods import get
from tests.deploy.conftest import asked, first_broadcast, small_charter, small_federation

PRIVATE = {"dp_noise": 1.0, "dp_delta": 0.1, "dp_clip": 0.5}
pytestmark = pytest.mark.filterwarnings("ignore::priory.fed.capabilities.AdviceWarning")


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """The reply of client 1 in the first round under some settings, and its charter; made once for each."""
    known: dict[str, tuple] = {}

    def answer(name="fedavg", **settings):
        said = repr((name, settings))
        if said not in known:
            charter = small_charter(get(name)(), **settings)
            rows = of_client(small_federation(), 1)
            client = Client(charter, 1, lambda: rows, tmp_path_factory.mktemp("node"))
            known[said] = charter, client.answer(asked(charter))
        return known[said]

    return answer


def judge(charter, reply, **changed):
    """The verdict on a reply of client 1, and on one that asks for something else."""
    request = asked(charter, **changed)
    down = first_broadcast(charter)
    return validate_reply(charter, charter.method, charter.task_of(1), down, reply, 1, dict(request.config))


def altered(charter, reply, change):
    """A reply whose message was decoded, changed and encoded again."""
    message = wire.decode(reply.arrays, charter.uplink)
    return dataclasses.replace(reply, arrays=wire.encode(change(message)))


def numbers(change):
    return lambda message: replace(message, payload=jax.tree.map(change, message.payload))


def weight(value):
    return lambda message: replace(message, weight=np.float32(value))


def one_number(value):
    def change(message):
        leaves, treedef = jax.tree.flatten(message.payload)
        leaves[0] = leaves[0].copy()
        leaves[0].flat[0] = value
        return replace(message, payload=jax.tree.unflatten(treedef, leaves))

    return change


def test_an_honest_reply_counts_as_it_was_sent(answered):
    charter, reply = answered()
    found = judge(charter, reply)
    assert isinstance(found, Accepted)
    assert int(found.message.sender) == 1
    assert found.num_bytes == sum(map(len, reply.arrays.values()))
    assert found.metrics == reply.metrics
    sent = wire.decode(reply.arrays, charter.uplink)
    jax.tree.map(np.testing.assert_array_equal, found.message.payload, sent.payload)


def test_who_was_not_to_upload_counts_without_a_message(answered):
    charter, reply = answered()
    found = judge(charter, reply, uploads=False)
    assert isinstance(found, Accepted)
    assert found.message is None


EVERYBODY = sum(small_federation().train.count.tolist())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (one_number(np.nan), "not finite"),
        (one_number(np.inf), "not finite"),
        (one_number(-np.inf), "not finite"),
        (one_number(1e9), "norm"),
        (numbers(lambda leaf: np.full_like(leaf, 3e38)), "norm"),
        (weight(np.nan), "not finite"),
        (weight(np.inf), "not finite"),
        (weight(-1), "weight"),
        (weight(EVERYBODY + 1), "weight"),
    ],
    ids=["NaN", "inf", "-inf", "large", "overflow", "NaN weight", "infinite weight", "negative", "more than there are"],
)
def test_numbers_that_may_not_enter_a_sum_are_refused(answered, change, reason):
    charter, reply = answered()
    found = judge(charter, altered(charter, reply, change))
    assert isinstance(found, Refused)
    assert found.reason == reason
    assert found.sentence == f"The update of client 1 was screened for its {reason}."


def test_a_weight_of_all_examples_together_is_the_most(answered):
    charter, reply = answered()
    assert isinstance(judge(charter, altered(charter, reply, weight(EVERYBODY))), Accepted)


def test_the_largest_norm_is_the_operators_choice(answered):
    charter, reply = answered(max_norm=1e-6)
    assert visit.reason_of(reply.config["status"]) == "norm"
    _, fine = answered()
    found = judge(charter, fine)
    assert (found.reason, found.sentence) == ("norm", "The update of client 1 was screened for its norm.")


@pytest.mark.parametrize(
    ("changed", "named"),
    [({"run": "run-0"}, "run=run-0"), ({"round": 7}, "round=7"), ({"kind": "evaluate"}, "kind=evaluate")],
    ids=["run", "round", "kind"],
)
def test_an_answer_to_another_question_is_stale(answered, changed, named):
    charter, reply = answered()
    found = judge(charter, dataclasses.replace(reply, config=dict(reply.config) | changed))
    assert found.reason == "stale"
    assert f"It answers {named} where " in found.sentence


@pytest.mark.parametrize("config", [{}, {"run": ["run-1"]}, {"run": "x" * 10**6}], ids=["none", "list", "long"])
def test_whatever_a_reply_says_of_itself_is_told_in_a_short_line(answered, config):
    charter, reply = answered()
    told = {} if not config else dict(reply.config) | config
    found = judge(charter, dataclasses.replace(reply, config=told))
    assert found.reason == "stale"
    assert len(found.sentence) < 200


@pytest.mark.parametrize("status", [None, "counted", 1.0, -1, 99, [1], True, b"1"])
def test_a_status_that_is_none_is_garbage(answered, status):
    charter, reply = answered()
    found = judge(charter, dataclasses.replace(reply, config=dict(reply.config) | {"status": status}))
    assert found.reason == "garbage"
    assert found.sentence.startswith("status=")


@pytest.mark.parametrize("reason", screen.REASONS[1:])
def test_a_client_that_found_its_own_update_unfit_is_refused_for_it(answered, reason):
    charter, reply = answered()
    status = visit.STATUSES.index(reason)
    found = judge(charter, dataclasses.replace(reply, config=dict(reply.config) | {"status": status}, arrays={}))
    assert (found.reason, found.sentence) == (reason, "The client found its own update unfit and kept its old state.")


def test_a_client_that_says_it_sent_and_did_not_is_refused(answered):
    charter, reply = answered()
    assert judge(charter, dataclasses.replace(reply, arrays={})).reason == "keys"


def test_what_a_client_sends_although_it_says_it_does_not_is_ignored(answered):
    charter, reply = answered()
    found = judge(charter, dataclasses.replace(reply, config=dict(reply.config) | {"status": visit.KEPT}))
    assert found.message is None


@pytest.mark.parametrize("reason", ["keys", "shape", "dtype", "oversized", "garbage"])
def test_bytes_that_do_not_fit_are_refused_for_the_reason_of_the_wire(answered, reason):
    charter, reply = answered()
    name = next(name for name in reply.arrays if name != "weight")
    array = wire.from_bytes(name, reply.arrays[name])
    changed = {
        "keys": {"more": b""},
        "shape": {name: wire.encode({"": array[None]})[""]},
        "dtype": {name: wire.encode({"": array.astype(np.float64)})[""]},
        "oversized": {name: bytes(10**6)},
        "garbage": {name: b"garbage"},
    }[reason]
    found = judge(charter, dataclasses.replace(reply, arrays=dict(reply.arrays) | changed))
    assert isinstance(found, Refused)
    assert found.reason == reason


def test_a_nodes_own_sentence_is_told_on_one_line_of_bounded_length(answered):
    charter, _ = answered()
    found = judge(charter, Reply(error="broken\n\tand " + "long " * 1000))
    assert found.reason == "node"
    assert found.sentence.startswith("broken and long")
    assert len(found.sentence) == 300


def test_figures_that_are_no_numbers_are_left_out(answered):
    charter, reply = answered()
    figures = {"loss": 1, "words": "two", "many": [1.0], "drift": float("nan"), "huge": 10**400}
    found = judge(charter, dataclasses.replace(reply, metrics=figures))
    assert found.metrics["loss"] == 1.0
    assert set(found.metrics) == {"loss", "drift"}


def test_a_thin_message_is_filled_up_again(answered):
    charter, reply = answered("sfedbayes")
    assert isinstance(charter.uplink.payload, Thin)
    found = judge(charter, reply)
    shapes = jax.tree.map(jnp.shape, found.message.payload)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, charter.contact().message.payload)


@pytest.mark.parametrize(("factor", "accepted"), [(1.0, True), (1.00001, True), (1.01, False)])
def test_central_privacy_takes_no_difference_above_the_clipping_norm(answered, factor, accepted):
    charter, reply = answered(dp="central", **PRIVATE)
    message = wire.decode(reply.arrays, charter.uplink)
    norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(message.payload)))
    scale = np.float32(factor * PRIVATE["dp_clip"] / norm)
    found = judge(charter, altered(charter, reply, numbers(lambda leaf: leaf * scale)))
    assert isinstance(found, Accepted) == accepted
    assert accepted or found.reason == "norm"


@pytest.mark.parametrize(
    ("part", "factor", "accepted"), [("beta", 0.99, True), ("beta", 1.01, False), ("phi", 1.01, False)]
)
def test_central_privacy_takes_no_part_above_its_own_clipping_norm(answered, part, factor, accepted):
    """The norm of all parts together stays far below the larger of the two."""
    norms = {"beta": 0.5, "phi": 0.001 if part == "phi" else 100.0}
    clip = ",".join(str(norm) for norm in norms.values())
    charter, reply = answered("fedpop", dp="central", **PRIVATE | {"dp_clip": clip})

    def alter(message):
        leaves = getattr(message.payload, part)
        norm = np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(leaves)))
        scaled = jax.tree.map(lambda leaf: leaf * np.float32(factor * norms[part] / norm), leaves)
        return replace(message, payload=replace(message.payload, **{part: scaled}))

    found = judge(charter, altered(charter, reply, alter))
    assert isinstance(found, Accepted) == accepted
    assert accepted or found.reason == "norm"


def test_central_privacy_lets_nobody_count_twice(answered):
    charter, reply = answered(dp="central", **PRIVATE)
    assert judge(charter, altered(charter, reply, weight(2))).reason == "weight"
