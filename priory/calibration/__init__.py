"""Whether posteriors mean what they say: methods on a problem whose truth is known."""

from priory.calibration.ranks import Coverage, Verdict, judge
from priory.calibration.trial import Checked, Options, check, enough, passing

__all__ = ["Checked", "Coverage", "Options", "Verdict", "check", "enough", "judge", "passing"]
