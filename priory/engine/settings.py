"""How a federation is run: one dataclass for `simulate`, the command line and the manifest."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal

from priory.core.errors import UsageError
from priory.engine.cohort import Participation
from priory.fed import channel as uplink
from priory.fed import robust as centres
from priory.fed import schedule
from priory.fed.method import Channel, Method, Task
from priory.fed.privacy import NoisedSum
from priory.fed.schedule import Schedule
from priory.fed.screen import Limits

PARTICIPATION = ("fixed", "bernoulli")
WEIGHTING = ("method", "uniform", "examples")
PRIVACY = ("central", "local")
MOST_EPSILON = 1e4
LEAST = {"rounds": 0, "eval_every": 0, "onboard_visits": 0, "resident_bytes": 0, "eval_clients": 1, "client_batch": 1}


@dataclass(frozen=True)
class Settings:
    """Everything about a run that is neither the method nor the data.

    Attributes:
        rounds: T, rounds of communication.
        cohort: Clients whose messages count in a round; all by default.
        active: Clients that run and keep their state in a round, of which the cohort uploads; the cohort by default.
        participation: Exactly so many clients a round, or each client independently (bernoulli).
        weighting: Keep the method's weights of the messages, or override them: equal, or by number of examples.
        max_norm: Largest norm of what a client learned that is accepted; a larger update is rejected and named.
        robust: Centre of the messages in place of their weighted mean, each counting once: median, trimmed:SHARE
            (dropped at each end), krum, krum:FALSE or norm-clip:NORM; for linear methods.
        exclude_uncertain: Share of a round's uploaders left out, those least sure of their own validation examples.
        schedule: Hyper-parameters that change with the round: FIELD=step:FACTOR@FRACTION,... | cosine | linear.
        compress: What clients send is compressed: qsgd:LEVELS, random:FRACTION or top:FRACTION; not at all by default.
        dp: Differential privacy of clients: noise on the sum of what they send (central) or on each message (local).
        dp_epsilon: Budget that the noise is solved for, over all rounds; with dp_noise a run ends before exceeding it.
        dp_delta: δ of the guarantee; far below 1 / clients.
        dp_noise: Standard deviation of the noise over the sensitivity.
        dp_clip: Norm that what a client learned is scaled down to; not used where a method states its sensitivity. For
            a method whose messages have parts of different scale, one norm for each: fedpop takes BETA,PHI.
        dp_sensitivity: Distance that one client is assumed to move a release by, in place of the one that is known; in
            units of the norms if there are several.
        seed: Root of all randomness of the run.
        model: linear, mlp:WIDTH[,WIDTH], cnn, cnn3:CHANNELS,WIDTH, reddi, intercept, factor:RANK or
            package.module:factory; chosen from the data by default.
        models: Several models, spread over the clients in turn: mlp:32,mlp:256,cnn; for methods that exchange no
            weights.
        head: Which parameter paths are the head (prefix or regular expression); the last layer by default.
        scale: Noise of a regression: a number, learned, or column (known for each row, the default where it is).
        eval_every: Rounds between evaluations; a tenth of all rounds by default, 0 for only one at the end.
        eval_clients: Clients evaluated on the way; at the end it is always all of them.
        eval_newcomers: Evaluate the clients that were held out at every evaluation, not only at the end.
        onboard_visits: Local updates that a client which never took part does before it is personalised.
        client_batch: Clients that a device runs at once; 1 (a scan) on CPU and all (a vmap) elsewhere by default.
        resident_bytes: Most bytes of client state kept on the devices; beyond that it stays on disk.
    """

    rounds: int = 50
    cohort: int | None = None
    active: int | None = None
    participation: Literal["fixed", "bernoulli"] = "fixed"
    weighting: Literal["method", "uniform", "examples"] = "method"
    max_norm: float = 1e8
    robust: str | None = None
    exclude_uncertain: float = 0.0
    schedule: tuple[str, ...] = ()
    compress: str | None = None
    dp: Literal["central", "local"] | None = None
    dp_epsilon: float | None = None
    dp_delta: float = 1e-5
    dp_noise: float | None = None
    dp_clip: float | str = 1.0
    dp_sensitivity: float | None = None
    seed: int = 0
    model: str | None = None
    models: str | None = None
    head: str | None = None
    scale: float | Literal["learned", "column"] | None = None
    eval_every: int | None = None
    eval_clients: int | None = None
    eval_newcomers: bool = False
    onboard_visits: int = 1
    client_batch: int | None = None
    resident_bytes: int = 1 << 30

    def check(self, num_clients: int) -> None:
        """Raise on a setting that this federation cannot have."""
        for name, choice in (("participation", PARTICIPATION), ("weighting", WEIGHTING)):
            if getattr(self, name) not in choice:
                raise UsageError(f"{name}={getattr(self, name)!r} is unknown; choose {', '.join(choice)}.")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed={self.seed} is out of range; choose a whole number from 0 to 2^32 - 1.")
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                what = "too small" if least else "negative"
                raise UsageError(f"{name.replace('_', '-')}={value} is {what}; choose {least} or more.")
        if not (_is_number(self.max_norm) and self.max_norm > 0):
            raise UsageError(f"max-norm={self.max_norm!r} is not a positive number; choose one such as 1e8, or inf.")
        share = self.exclude_uncertain
        if not isinstance(share, int | float) or not 0 <= share < 1:
            raise UsageError(f"exclude-uncertain={share!r} lies outside [0, 1); choose a share such as 0.2.")
        if self.compress is not None:
            uplink.parse(self.compress)
        if self.robust is not None:
            self._check_cohort(centres.parse(self.robust), num_clients)
        self._check_privacy()
        if self.models is not None and not isinstance(self.models, str):
            raise UsageError(f"models={self.models!r} is no text; write 'mlp:32,linear', or give a list as model=.")
        if self.model is not None and self.models is not None:
            raise UsageError(f"model={self.model} and models={self.models} both name networks; give one of them.")
        self.drawn_from(num_clients).check()

    def _check_cohort(self, rule: centres.Rule, num_clients: int) -> None:
        """Raise when a cohort is too small for so many false messages."""
        cohort = num_clients if self.cohort is None else self.cohort
        if isinstance(rule, centres.Krum) and rule.false and cohort < 2 * rule.false + 3:
            raise UsageError(
                f"robust={self.robust} needs {2 * rule.false + 3} clients a round (2 FALSE + 3), and the cohort has "
                f"{cohort}; choose krum, or a larger cohort."
            )

    def _check_privacy(self) -> None:
        """Raise on numbers that no privacy can have."""
        if self.dp is not None and self.dp not in PRIVACY:
            raise UsageError(f"dp={self.dp!r} is unknown; choose {' or '.join(PRIVACY)}.")
        _ = self.dp_clips
        for name in ("dp_epsilon", "dp_noise", "dp_sensitivity"):
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and 0 < value < math.inf):
                raise UsageError(f"{name.replace('_', '-')}={value!r} is not a positive number; choose one above 0.")
        if self.dp_epsilon is not None and self.dp_epsilon > MOST_EPSILON:
            raise UsageError(
                f"dp-epsilon={self.dp_epsilon:g} protects nothing; choose one below {MOST_EPSILON:g}, or leave out dp."
            )
        if not (_is_number(self.dp_delta) and 0 < self.dp_delta < 1):
            raise UsageError(f"dp-delta={self.dp_delta!r} lies outside (0, 1); choose one such as 1e-5.")

    @property
    def dp_clips(self) -> tuple[float, ...]:
        """The norms of `dp_clip`: one for whole messages, or one for each part; raise if they are no such numbers."""
        try:
            norms = tuple(map(float, str(self.dp_clip).split(",")))
        except ValueError:
            norms = (math.nan,)
        if not all(0 < norm < math.inf for norm in norms):
            raise UsageError(
                f"dp-clip={self.dp_clip!r} is not a positive number, nor several with commas between; give one such as "
                "1, or one for each part such as 0.5,20."
            )
        return norms

    def in_the_clear(self) -> "Settings":
        """Return these settings without privacy."""
        fresh: dict[str, Any] = {name: value for name, value in vars(Settings()).items() if name.startswith("dp")}
        return dataclasses.replace(self, **fresh)

    def check_exclusion(self, method: Method, num_validation: int) -> None:
        """Raise when uncertain clients are to be left out and the method or the data allow no judging."""
        if self.exclude_uncertain == 0:
            return
        said = f"exclude-uncertain={self.exclude_uncertain}"
        if method.pools:
            raise UsageError(f"{said} needs clients with models of their own, but the method pools the data; choose 0.")
        if num_validation == 0:
            raise UsageError(f"{said} judges clients by validation examples, and there are none; use --validation 0.1.")

    def check_robust(self, method: Method, name: str, channel: Channel | None = None) -> None:
        """Raise when a centre of messages is asked for where no centre can stand for them."""
        if self.robust is None:
            return
        said = f"robust={self.robust}"
        if method.pools:
            raise UsageError(f"{said} needs messages of several clients, but {name} pools their data; leave it out.")
        if not method.linear:
            has_form = any(field.name == "linear" for field in dataclasses.fields(method))
            other = f"use {name} in its linear form (--linear), or" if has_form else "choose"
            raise UsageError(
                f"{said} leaves one message of a round, but {name} is not linear: it needs them all; {other} a linear "
                "method such as fedavg."
            )
        if self.dp == "central" or isinstance(channel, NoisedSum):
            raise UsageError(f"{said} is no sum, which is what the noise of dp=central is made for; use --dp local.")
        if self.weighting == "examples":
            raise UsageError(f"{said} lets every message count once, so weighting=examples has no effect; use uniform.")

    def channel_of(self, method: Method, given: Channel | None) -> Channel | None:
        """Return the channel of payloads, checked: the one that was given, or the one named by `compress`.

        It acts on what the method says may be compressed; a method that pools sends nothing.
        """
        if given is not None:
            given.check()
        if self.compress is None:
            return given
        if given is not None:
            raise UsageError(
                f"compress={self.compress} and channel={given} both change what is sent; give one of them."
            )
        if method.pools:
            return None
        return uplink.compressing(uplink.parse(self.compress), method)

    def advice(self, method: Method, channel: Channel | None) -> dict[str, str]:
        """Return sentences by kind about settings that break an assumption of the method's paper."""
        if not (method.unbiased and uplink.is_biased(channel)):
            return {}
        said = f"channel={channel}" if self.compress is None else f"compress={self.compress}"
        return {
            "bias": f"{said} is biased, and {method.unbiased} needs compression without bias; use compress=qsgd:16 or "
            "random:0.1."
        }

    def limits(self, task: Task) -> Limits:
        """Return what a message may be at most; no client has more examples than all together."""
        return Limits(float(self.max_norm), float(max(1, task.num_examples)))

    def drawn_from(self, num_clients: int, groups: int = 1) -> Participation:
        """Return how clients are drawn from so many, in so many groups."""
        cohort = num_clients if self.cohort is None else self.cohort
        active = cohort if self.active is None else self.active
        return Participation(num_clients, cohort, active, self.participation, groups)

    def schedules(self, method: Method) -> tuple[Schedule, ...]:
        """Return the schedules, each checked to name a number of the method."""
        parsed = tuple(schedule.parse(text) for text in self.schedule)
        fields = [one.field for one in parsed]
        for name in fields:
            if fields.count(name) > 1:
                raise UsageError(f"{name.replace('_', '-')} has {fields.count(name)} schedules; give one.")
        for one in parsed:
            schedule.find(method, one.field)
            if one.field.startswith("finetune"):
                raise UsageError(f"schedule={one} has no effect, since personalisation knows no round; leave it out.")
        return parsed

    def evaluates_at(self, t: int) -> bool:
        """Return whether the state after t rounds is evaluated on the way."""
        every = max(1, self.rounds // 10) if self.eval_every is None else self.eval_every
        return every > 0 and t > 0 and t % every == 0

    def next_stop(self, completed: int, block: int) -> int:
        """Return the round after which the next block of at most `block` rounds ends: none runs past an evaluation."""
        for t in range(completed + 1, min(completed + block, self.rounds)):
            if self.evaluates_at(t):
                return t
        return min(completed + block, self.rounds)


def make(values: dict[str, Any]) -> Settings:
    """Return settings from keyword arguments, with a sentence for a name that does not exist."""
    kinds = {field.name: field.type for field in dataclasses.fields(Settings)}
    for name, value in values.items():
        if name not in kinds:
            raise UsageError(f"{name} is not a setting of a run; choose from {', '.join(kinds)}.")
        is_whole = kinds[name] in (int, int | None) and value is not None
        if is_whole and (isinstance(value, bool) or not hasattr(value, "__index__")):
            raise UsageError(f"{name.replace('_', '-')}={value!r} is not a whole number; give one.")
    if isinstance(values.get("dp_clip"), list | tuple):
        values = {**values, "dp_clip": ",".join(map(str, values["dp_clip"]))}
    if isinstance(values.get("schedule"), str):
        values = {**values, "schedule": (values["schedule"],)}
    return Settings(**{**values, "schedule": tuple(values.get("schedule", ()))})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
