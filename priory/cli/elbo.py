"""`priory elbo`: the lower bound on log p(D) that a run ended with."""

from collections.abc import Sequence

from priory import report
from priory.cli import flags
from priory.cli.run import opened, run_groups
from priory.engine import load

TEXT = "Print a lower bound on log p(D), D being the training examples of all clients that take part."
ASSUMPTION = (
    "A lower bound on log p(D) under the model's prior, estimated with one draw of each client's weights; its q_k is "
    "one local update from the final broadcast. What the method learned of the prior itself (such as its mean) is "
    "taken as given, so do not compare bounds across ways of learning it."
)


def elbo(argv: Sequence[str]) -> int:
    """The exit code of `priory elbo`."""
    values = flags.parse(run_groups("elbo"), argv, prog="priory elbo", text=TEXT)
    path, _ = opened(values)
    run = load(path, trust_code=values["output"]["trust_code"])
    bound = run.elbo()
    report.say(f"{run.name} on {run.federation.name} after {run.completed} of {run.settings.rounds} rounds")
    parts = {"  clients' terms": bound.per_client.sum(), "− KL(q(φ) ‖ p(φ))": bound.divergence, "= ELBO": bound.total}
    for name, value in (parts | {"  per example": bound.total / run.task.num_examples}).items():
        report.say(f"{name:20}{value:18,.1f} nats")
    report.say(ASSUMPTION)
    return 0
