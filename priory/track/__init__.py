"""Where else the metrics of a run go: TensorBoard, MLflow or Weights & Biases, whichever a person looks at already.

What is sent is what the run directory holds: every line of `metrics.jsonl`, the settings of `manifest.toml`, and from
`summary.json` what no line has. Numbers get names such as `personal/accuracy`; curves and text stay in the files. The
round is the step. A tool is imported when it is asked for, and keeps its own settings (where its server is, who sends).

A run that goes on after a crash sends all lines so far once more, save those the tool has; so no round is there twice,
and a run that was made without a tool can be sent to one later.
"""

from priory.track.tracker import Tracker, check

__all__ = ["Tracker", "check"]
