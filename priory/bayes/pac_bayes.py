"""PAC-Bayes: upper bounds on the true error of a random classifier, from its error on n rows and KL(q ‖ prior).

A Gibbs classifier draws a network from q for every answer. If the prior was fixed before the n rows were seen, and
these are independent draws of one distribution, then with probability 1 − δ over the rows, for every q at once,

    kl(R̂ ‖ R) ≤ c,   c = (KL(q ‖ prior) + log(2√n / δ)) / n,   kl the divergence of two coins

(Langford and Seeger 2001; Maurer 2004, arXiv:cs/0411099, for the 2√n). R̂ is the error of q on the rows and R the true
one. Everything below follows from this one event, so that the bounds hold together and not each with a δ of its own.
"""

import math

import scipy  # its parts load at their first use; a run needs none of them


def binary_kl(q: float, p: float) -> float:
    """Return KL(q ‖ p) in nats of coins with these probabilities; infinite where p rules out what q does."""
    return float(scipy.special.rel_entr(q, p) + scipy.special.rel_entr(1 - q, 1 - p))


def upper_inverse(q: float, nats: float) -> float:
    """Return the largest p with kl(q ‖ p) ≤ nats; it grows with both."""
    if not (math.isfinite(nats) and q < 1):
        return 1.0
    if q == 0:
        return -math.expm1(-nats)
    last = math.nextafter(1.0, 0.0)
    if nats <= 0 or binary_kl(q, last) <= nats:
        return q if nats <= 0 else 1.0
    return float(scipy.optimize.brentq(lambda p: binary_kl(q, p) - nats, q, last, xtol=1e-15, rtol=1e-15))


def sampled_error(error: float, num_draws: int, delta: float) -> float:
    """Return a bound, except with a chance δ over the draws, on the error of q on the rows, from the mean over draws.

    kl(mean of m draws ‖ R̂) ≤ log(2/δ)/m (Langford and Caruana, (Not) Bounding the True Error, NIPS 2001).
    """
    return upper_inverse(error, math.log(2 / delta) / num_draws)


def complexity(divergence: float, num_rows: int, delta: float) -> float:
    """Return c, what the bounds pay for each row."""
    return (divergence + math.log(2 * math.sqrt(num_rows) / delta)) / num_rows


def kl_bound(error: float, cost: float) -> float:
    """Return the bound on R by inverting kl(R̂ ‖ R) ≤ c."""
    return upper_inverse(error, cost)


def lambda_bound(error: float, cost: float) -> tuple[float, float]:
    """Return the least of R̂/(1 − λ/2) + c/(λ(1 − λ/2)) over λ in (0, 2), cut at 1, and the λ where it is.

    Since kl(R̂ ‖ R) ≥ (R − R̂)²/2R for R > R̂, the event above gives this for all λ together (Thiemann et al., A strongly
    quasiconvex PAC-Bayesian bound, ALT 2017; eq. (121) of FedHB, arXiv:2305.04979): choosing λ costs nothing. It is
    never below `kl_bound`.
    """
    if not math.isfinite(cost):
        return 1.0, 1.0
    weight = 2 / (math.sqrt(2 * error / cost + 1) + 1)
    return min(1.0, (error + cost / weight) / (1 - weight / 2)), weight
