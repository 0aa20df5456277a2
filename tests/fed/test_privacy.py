"""zCDP in closed form; what a private channel sends, and that it tells nothing beside it."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from priory.core import rng, trees
from priory.fed import privacy
from priory.fed.method import Message
from priory.fed.parts import Parts
from priory.fed.privacy import Canaries, Noised, NoisedSum

BIG = {"a": jnp.full((30, 40), 2.0), "b": jnp.full(800, -1.0)}  # 2000 numbers


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@dataclass(frozen=True)
class Sends:
    """A method whose reference is one number everywhere, or whatever is sent."""

    middle: float | None

    def reference(self, task, down, payload):
        del task, down
        return payload if self.middle is None else jax.tree.map(lambda leaf: jnp.full_like(leaf, self.middle), payload)


PLAIN = Sends(0.0)


def sent(channel, payload, method=PLAIN, weight=7.0, fine=True, sender=0):
    message = Message(payload, jnp.float32(weight), jnp.int32(sender))
    key = rng.root(0)
    return privacy.upload(channel, method, None, None, message, jnp.bool_(fine), key)[0]


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 30.0])
def test_the_inverse_of_epsilon_is_exact(epsilon, delta):
    assert privacy.epsilon_of(privacy.rho_of(epsilon, delta), delta) == pytest.approx(epsilon, rel=1e-12)


def test_rho_is_as_printed():
    log = math.log(1e4)
    assert privacy.rho_of(1.0, 1e-4) == pytest.approx((math.sqrt(log + 1) - math.sqrt(log)) ** 2, rel=1e-12)


def test_the_papers_sufficient_rho_spends_more_than_epsilon():  # B.1 as printed
    printed = 1 / (4 * math.log(1e4))
    assert printed == pytest.approx(0.02714, abs=5e-6)
    assert privacy.epsilon_of(printed, 1e-4) > 1 > privacy.epsilon_of(0.99 * privacy.rho_of(1.0, 1e-4), 1e-4)


@pytest.mark.parametrize(("rows", "sd"), [(1, 6.23), (2000, 278.6)])
def test_the_noise_that_fedbnn_needs_for_epsilon_1(rows, sd):
    rho = privacy.rho_of(1.0, 1e-4)
    assert rho == pytest.approx(0.02576, abs=5e-6)
    assert math.sqrt(2 * rows / (2 * rho)) == pytest.approx(sd, rel=2e-4)  # B.5 solved for σ, with Δ = √(2 · rows)
    assert privacy.gaussian_rho(math.sqrt(2 * rows), sd) == pytest.approx(rho, rel=1e-3)


def test_rho_adds_up_on_the_same_data_and_not_on_disjoint_data():
    assert privacy.sequential(0.1, 0.2, 0.3) == pytest.approx(0.6, rel=1e-15)
    assert privacy.parallel(0.1, 0.3, 0.2) == 0.3
    assert privacy.sequential() == privacy.parallel() == 0.0


def test_the_noise_of_a_message_has_the_variance_it_should():
    channel, num = Noised(clip=math.inf, sd=3.0), 2000
    noise = flat(trees.sub(channel.send(BIG, (), rng.root(1))[0], BIG))
    assert abs(noise.mean()) < 4 * 3.0 / math.sqrt(num)  # four standard errors
    assert abs(noise.var() - 9.0) < 4 * 9.0 * math.sqrt(2 / num)  # that of a variance is σ² √(2/n)


def test_the_noise_of_a_sum_has_the_variance_it_should():
    channel, num = NoisedSum(clip=1.0, sd=3.0, expected=5.0), 2000
    noise = 5.0 * flat(channel.release(BIG, rng.root(1))) - flat(BIG)
    assert abs(noise.mean()) < 4 * 3.0 / math.sqrt(num)
    assert abs(noise.var() - 9.0) < 4 * 9.0 * math.sqrt(2 / num)


def test_no_two_numbers_get_the_same_noise():
    noise = flat(Noised(clip=math.inf, sd=1.0).send(trees.zeros(BIG), (), rng.root(1))[0])
    assert len(np.unique(noise)) > 1990


def test_a_message_is_clipped_before_it_gets_noise():
    out = Noised(clip=1.0, sd=1e-6).send(BIG, (), rng.root(1))[0]
    assert float(trees.norm(out)) == pytest.approx(1.0, abs=1e-3)


def test_a_sum_is_of_clipped_messages_without_noise():
    out = NoisedSum(clip=1.0, sd=100.0).send(BIG, (), rng.root(1))[0]
    np.testing.assert_allclose(flat(out), flat(BIG) / float(trees.norm(BIG)), rtol=1e-5)


def test_what_is_clipped_is_the_difference_to_the_reference():
    out = sent(Noised(clip=1.0, sd=1e-9), {"w": jnp.full(4, 10.0)}, Sends(2.0)).payload["w"]
    np.testing.assert_allclose(out, 2.0 + 0.5, rtol=1e-6)  # (8, 8, 8, 8) has norm 16


def test_the_reference_does_not_look_at_the_payload():
    """One that did would give the payload away: payload − reference would be 0, and the reference goes in the clear."""
    out = sent(Noised(clip=1.0, sd=1e-9), {"w": jnp.full(4, 10.0)}, Sends(None)).payload["w"]
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)


def test_for_a_sum_the_difference_travels():
    out = sent(NoisedSum(clip=1.0, sd=1.0), {"w": jnp.full(4, 10.0)}, Sends(2.0)).payload["w"]
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 3.0, 1000.0])
@pytest.mark.parametrize("channel", [Noised(1.0, 1.0), NoisedSum(1.0, 1.0)], ids=["local", "central"])
def test_every_message_counts_once(channel, weight):
    assert float(sent(channel, BIG, weight=weight).weight) == 1.0


@pytest.mark.parametrize("case", [{"weight": 0.0}, {"fine": False}], ids=["nothing to send", "not finite"])
def test_who_has_nothing_to_say_sends_the_reference_with_noise(case):
    payload = {"w": jnp.array([1.0, jnp.nan, 3.0])} if "fine" in case else {"w": jnp.ones(3)}
    got = sent(Noised(clip=1.0, sd=1e-3), payload, Sends(2.0), **case).payload["w"]
    other = sent(Noised(clip=1.0, sd=1e-3), {"w": jnp.full(3, 2.0)}, Sends(2.0)).payload["w"]
    np.testing.assert_array_equal(got, other)
    assert not np.allclose(got, 2.0, atol=1e-5)


def test_other_noise_compiles_nothing():
    traced = []

    @jax.jit
    def send(channel, payload):
        traced.append(1)
        return channel.send(payload, (), rng.root(0))[0]

    for sd in (1.0, 2.0):
        send(Noised(clip=1.0, sd=sd), BIG)
    assert len(traced) == 1


def in_units_of(parts, payload):
    return flat({name: payload[name] / unit for name, unit in zip(parts.names, parts.units, strict=True)})


APART = Parts(("a", "b"), (0.5, 200.0))


def test_every_part_gets_noise_of_its_unit():
    zero, num = trees.zeros(BIG), 2000
    local = Noised(clip=1.0, sd=3.0, parts=APART).send(zero, (), rng.root(1))[0]
    central = NoisedSum(clip=1.0, sd=3.0, expected=5.0, parts=APART).release(zero, rng.root(2))
    for noise in (in_units_of(APART, local), 5.0 * in_units_of(APART, central)):
        for part in np.split(noise, [1200]):
            assert abs(part.mean()) < 4 * 3.0 / math.sqrt(len(part))
            assert abs(part.var() - 9.0) < 4 * 9.0 * math.sqrt(2 / len(part))
        assert abs(noise.var() - 9.0) < 4 * 9.0 * math.sqrt(2 / num)


@pytest.mark.parametrize("other", [0.0, -1.0], ids=["one client less", "another client"])
def test_one_client_moves_a_sum_by_the_root_of_the_number_of_parts_and_no_more(other):
    """The worst client fills every part; twice as far is one that fills them in the opposite direction."""
    channel, draw = NoisedSum(clip=1.0, sd=1.0, parts=APART), np.random.default_rng(0)
    sent_by = jax.jit(lambda payload: channel.send(payload, (), rng.root(0))[0])
    reached = []
    for size in (0.1, 1.0, 1e3, 1e6):
        payload = jax.tree.map(lambda leaf, size=size: jnp.float32(size * draw.normal(size=leaf.shape)), BIG)
        moved = trees.sub(sent_by(payload), trees.scale(abs(other), sent_by(trees.scale(other, payload))))
        reached.append(np.linalg.norm(in_units_of(APART, moved)))
    most = (1 - other) * math.sqrt(2)
    assert max(reached) == pytest.approx(most, rel=1e-5)
    assert min(reached) < 0.9 * most


def canaries(signs, radius=2.0, **apart):
    return Canaries(jnp.int32(10), jnp.asarray(signs, jnp.float32), radius, rng.root(5), **apart)


def test_a_canary_fills_every_part():
    some = canaries([1.0, -1.0], radius=math.sqrt(2), parts=APART)
    got = sent(NoisedSum(clip=1.0, canaries=some, parts=APART), BIG, sender=11).payload
    for name, unit in zip(APART.names, APART.units, strict=True):
        assert float(trees.norm(got[name])) == pytest.approx(unit, rel=1e-5)
    assert float(some.score(got, jnp.int32(11))) == pytest.approx(-math.sqrt(2), rel=1e-5)
    np.testing.assert_allclose(some.scores(got)[1], -math.sqrt(2), rtol=1e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_a_canary_sends_its_direction_with_the_sign_of_its_coin(sign):
    some = canaries([1.0, sign])
    got = sent(NoisedSum(clip=9.0, canaries=some), BIG, sender=11).payload
    direction = some.direction(BIG, jnp.int32(1))
    assert float(trees.norm(direction)) == pytest.approx(1.0, rel=1e-5)
    np.testing.assert_allclose(flat(got), 2.0 * sign * flat(direction), atol=1e-6)


def test_a_client_that_is_no_canary_sends_its_own():
    channel = NoisedSum(clip=1e6, canaries=canaries([1.0, 1.0]))
    np.testing.assert_allclose(flat(sent(channel, BIG, sender=9).payload), flat(BIG))


def test_a_score_is_the_inner_product_with_the_canarys_own_direction():
    some = canaries([1.0, -1.0])
    seen = some.direction(BIG, jnp.int32(1))
    across = float(trees.dot(seen, some.direction(BIG, jnp.int32(0))))
    np.testing.assert_allclose(some.scores(seen), [across, 1.0], atol=1e-5)
    assert float(some.score(seen, jnp.int32(11))) == pytest.approx(1.0, abs=1e-5)
    assert float(some.score(seen, jnp.int32(3))) == 0.0
    assert abs(across) < 5 / math.sqrt(2000)  # five standard deviations of two random directions' inner product


@pytest.mark.parametrize("bad", [Noised(clip=0.0), Noised(sd=0.0), NoisedSum(clip=math.inf), NoisedSum(sd=-1.0)])
def test_a_channel_without_protection_is_refused(bad):
    with pytest.raises(ValueError, match="is not a positive number"):
        bad.check()
